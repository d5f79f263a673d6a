"""Requests together and alone on one engine, how many of their forwards were joined, and what these gave: MODEL
eager|graph.
"""

import json
import random
import sys
from typing import Any, ClassVar

from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

from dlinfer.framework.lmdeploy_ext.running import graph_runner
from dlinfer.framework.lmdeploy_ext.stepping import joined_forward
from dlinfer.framework.lmdeploy_ext.stepping.prompt_pace import PromptPace

LIMIT = 48
BLOCK = 16
BATCH = 8
WORDS = "the quick brown fox jumps over lazy dog hello world one two three four".split()


class Counted(joined_forward._Joined):
    """Notes the sizes of joined forwards, and those that gave one row of each prompt."""

    sizes: ClassVar[list[int]] = []
    one_row_each: ClassVar[list[bool]] = []

    async def forward(self, original: Any, inputs: Any) -> dict[str, Any]:
        is_first = self._is_first
        output = await super().forward(original, inputs)
        if is_first and self._second is not None:
            self.sizes.append(inputs.input_ids.numel() + self._prompts.input_ids.numel())
            rows = self._second["hidden_states"].shape[1]
            self.one_row_each.append(rows == self._prompts.seq_length.numel())
        return output


def run(model: str, eager: bool, caching: bool) -> dict[str, Any]:
    draw = random.Random(0)
    prompts = [" ".join(draw.choices(WORDS, k=draw.choice((1, 3, 10, 40, 90, 150)))) for _ in range(24)]
    greedy = [
        GenerationConfig(max_new_tokens=draw.choice((2, 5, 9, 17, 30)), do_sample=False, ignore_eos=True)
        for _ in prompts
    ]
    config = PytorchEngineConfig(
        device_type="cpu",
        dtype="float32",
        num_gpu_blocks=200,
        block_size=BLOCK,
        max_batch_size=BATCH,
        session_len=1024,
        eager_mode=eager,
        enable_prefix_caching=caching,
    )
    Counted.sizes, Counted.one_row_each = [], []
    with pipeline(model, backend_config=config) as pipe:  # pyright: ignore[reportCallIssue]
        together = [one.token_ids for one in pipe(prompts, gen_config=greedy, do_preprocess=False)]
        sizes = Counted.sizes
        runners = graph_runner.counts()
        alone = [
            pipe([prompt], gen_config=[gen], do_preprocess=False)[0].token_ids
            for prompt, gen in zip(prompts, greedy, strict=True)
        ]
    return {
        "together": together,
        "alone": alone,
        "joined": len(sizes),
        "most tokens": max(sizes, default=0),
        "one row each": sum(Counted.one_row_each),
        "eager phases": [one.reason for runner in runners for one in runner.phases if one.outcome == "eager"],
    }


def main() -> None:
    _, model, mode = sys.argv
    PromptPace.tokens = lambda self, seconds, *, decodes: LIMIT if decodes else 1024
    joined_forward._Joined = Counted  # pyright: ignore[reportPrivateUsage]
    told = {
        name: run(model, mode == "eager", caching)
        for name, caching in (("plain", False), ("prefix caching", True))
    }
    print(json.dumps({"limit": LIMIT + BATCH} | told))


if __name__ == "__main__":
    main()
