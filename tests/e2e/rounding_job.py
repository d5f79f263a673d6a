"""transformers' answers with quantised KV caches, from a process that never sees LMDeploy or dlinfer.

A job is ``{"runs": [[MODEL_FOLDER, POLICY, PROMPTS, NEW_TOKENS, OUT.npz], ...]}``. For prompt i ``tokens_i`` are greedy
ones (never one that ends a text), ``gaps_i`` the distances between the two best scores, and ``logits_i`` those of
the prompt and the tokens, fed at once.
"""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import hf_reference
from tests.e2e.rounding_cache import rounding_cache
from tests.jobs import answer_jobs


@torch.inference_mode()
def greedy(
    model: Any, ids: list[int], policy: int, new: int, ends: list[int]
) -> tuple[list[int], list[float]]:
    """(tokens, gaps), the prompt at once and then token by token."""
    cache = rounding_cache(model.config.num_hidden_layers, policy)
    tokens: list[int] = []
    gaps: list[float] = []
    given = ids
    while len(tokens) < new:
        scores = model(torch.tensor([given]), past_key_values=cache, use_cache=True).logits[0, -1].float()
        scores[ends] = -torch.inf
        best = scores.topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        given = tokens[-1:]
    return tokens, gaps


@torch.inference_mode()
def score(model: Any, ids: list[int], policy: int) -> np.ndarray:
    """Logits of a whole sequence, [len, vocabulary]."""
    cache = rounding_cache(model.config.num_hidden_layers, policy)
    return model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0].float().numpy()


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Answer each run."""
    hf_reference.check_alone()
    for folder, policy, prompts, new, out in job["runs"]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ends = hf_reference.end_tokens(model, tokenizer)
        arrays: dict[str, Any] = {}
        for i, prompt in enumerate(prompts):
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            tokens, gaps = greedy(model, ids, policy, new, ends)
            arrays |= {f"tokens_{i}": np.asarray(tokens), f"gaps_{i}": np.asarray(gaps)}
            arrays |= {f"logits_{i}": score(model, [*ids, *tokens], policy), f"ids_{i}": np.asarray(ids)}
        np.savez(out, **arrays)
    return {}


if __name__ == "__main__":
    answer_jobs(answer)
