"""How far models of some seeds are from where 16 bits decide: python -m tests.e2e.devices.seeds FAMILY [SEED ...]

Without seeds those of ``cells.SEEDS``; ``--first N`` looks at the first N and ends with the best of them. It asks
transformers on the CPU alone, by the prompts that the devices get. A model's margins are the smallest distances between
what was chosen and what was not, of the next token and, over all tokens and layers, of the last expert; each stands
beside the most that float16 changes such a score. The larger the quotients, the less a device's rounding decides; the
smaller of a seed's is its margin.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from examples.hf_reference import end_tokens, greedy
from examples.tiny_models.build import reference_folder
from examples.tiny_models.families import FAMILIES, SIZED
from tests.e2e.devices.cells import PROMPT_LENGTHS, SEEDS
from tests.e2e.harness import NEW_TOKENS, Lab


@dataclass(frozen=True)
class Margin:
    """gap: between what is chosen and the best that is not, the smallest. rounding: the most that float16 changes."""

    gap: float
    rounding: float

    @property
    def quotient(self) -> float:
        return self.gap / self.rounding if self.rounding else float("inf")

    def __str__(self) -> str:
        return f"{self.gap:.4f} / {self.rounding:.4f} = {self.quotient:.2f}"


@contextmanager
def routers_of(model: Any) -> Iterator[dict[int, list[Tensor]]]:
    """Number of experts chosen -> scores [tokens, experts] of every router that is called meanwhile, in float32."""
    scores: dict[int, list[Tensor]] = {}
    chosen = getattr(model.config, "num_experts_per_tok", 0)

    def keep(module: Any, given: tuple[Tensor, ...]) -> None:
        rows = given[0].reshape(-1, module.weight.shape[1])
        scores.setdefault(chosen, []).append(torch.nn.functional.linear(rows, module.weight).float())

    routers = [one for one in model.modules() if type(one).__name__.lower().endswith("topkrouter")]
    hooks = [one.register_forward_pre_hook(keep) for one in routers]
    try:
        yield scores
    finally:
        for hook in hooks:
            hook.remove()


def expert_gap(scores: Tensor, chosen: int) -> float:
    """The smallest distance between the last expert that is chosen and the next, of scores [tokens, experts]."""
    best = scores.topk(chosen + 1, dim=-1).values
    return float((best[:, chosen - 1] - best[:, chosen]).min())


def _whole(model: Any, ids: list[int]) -> tuple[Tensor, dict[int, list[Tensor]]]:
    with torch.inference_mode(), routers_of(model) as scores:
        return model(torch.tensor([ids])).logits[0].float(), scores


def margins(exact: Any, rounded: Any, prompts: list[list[int]], ends: list[int]) -> tuple[Margin, Margin]:
    """(of the next token, of experts) of a model in float32 and the same weights in float16, over greedy answers.

    End-of-sequence tokens, ``ends``, are never the next one. Of a model without experts the second is infinite.
    """
    gaps, changed, expert_gaps, expert_changes = [], [], [float("inf")], [0.0]
    for prompt in prompts:
        tokens, gap = greedy(exact, prompt, NEW_TOKENS, ends)
        ids = [*prompt, *tokens.tolist()[:-1]]
        (logits, scores), (logits16, scores16) = _whole(exact, ids), _whole(rounded, ids)
        gaps.append(float(gap.min()))
        changed.append(float((logits - logits16)[len(prompt) - 1 :].abs().max()))
        for chosen, layers in scores.items():
            expert_gaps += [expert_gap(one, chosen) for one in layers]
            pairs = zip(layers, scores16[chosen], strict=True)
            expert_changes += [float((one - other).abs().max()) for one, other in pairs]
    return Margin(min(gaps), max(changed)), Margin(min(expert_gaps), max(expert_changes))


def margins_of(lab: Lab, family: str, seed: int) -> tuple[Margin, Margin]:
    """The same of a family's model of some seed, by the prompts of ``cells.ask``."""
    folder = lab.model(family, seed, "float16")
    where = reference_folder(folder)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(where, dtype=dtype).eval()
        for dtype in (torch.float32, torch.float16)
    )
    tokenizer = AutoTokenizer.from_pretrained(where)
    texts = lab.prompts(folder, PROMPT_LENGTHS)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return margins(exact, rounded, prompts, end_tokens(exact, tokenizer))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=(*FAMILIES, *SIZED))
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--first", type=int, default=0, metavar="N")
    options = parser.parse_args()
    logging.disable_progress_bar()
    best: tuple[float, int] | None = None
    for seed in options.seeds or range(options.first) or [SEEDS[options.family]]:
        with tempfile.TemporaryDirectory(prefix="dlinfer-seeds-") as temp:
            token, expert = margins_of(Lab(Path(temp)), options.family, seed)
        margin = min(token.quotient, expert.quotient)
        if best is None or margin > best[0] or not options.first:
            print(f"{options.family} {seed}: next token {token}, experts {expert}", flush=True)
        best = max(best or (margin, seed), (margin, seed))
    if best and options.first:
        print(f"{options.family}: {best[1]} has the largest margin, {best[0]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
