"""What a step costs that joins a prompt to decoding sequences, against the two steps apart, in LMDeploy's engine.

    python -m benchmarks.joined_steps [--prompts 32 128 512] [--decoding 1 8 32] [--rounds 9] [--model FOLDER]

Shape of Qwen2.5-0.5B, with 64 tokens behind each decoding sequence. A round measures each prompt alone, then starts the
sequences, and sends each prompt while they decode. "of the parts" is the median of the rounds' ratios, joined / (alone
+ decoding), with its 95 % interval. The last line is JSON.
"""

import argparse
import functools
import os
import statistics
import threading
from typing import Any

from benchmarks.contender import LMDeploy
from benchmarks.models import add_model_options, chosen_model
from benchmarks.timing import publish, ratio

BEHIND = 64
"""Tokens of a decoding sequence's prompt."""


class Steps:
    """The steps of the engine of this process, as (seconds, prompt tokens, whether sequences decoded)."""

    def __init__(self) -> None:
        from dlinfer.framework.lmdeploy_ext.stepping.prompt_pace import PromptPace

        self.seen: list[tuple[float, int, bool]] = []
        original = PromptPace.note

        def note(pace: PromptPace, seconds: float, prompt_tokens: int, *, decodes: bool) -> None:
            self.seen.append((seconds, prompt_tokens, decodes))
            original(pace, seconds, prompt_tokens, decodes=decodes)

        PromptPace.note = note

    def take(self) -> list[tuple[float, int, bool]]:
        found, self.seen = self.seen, []
        return found


@functools.cache
def prompt_of(engine: LMDeploy, tokens: int) -> str:
    return engine._prompt(tokens)


def answer(engine: LMDeploy, prompts: list[int], tokens: int, started: threading.Event | None = None) -> None:
    """Generate so many tokens for prompts of these lengths. started: set once each has its first."""
    from lmdeploy import GenerationConfig

    gen = GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
    first: set[int] = set()
    texts = [prompt_of(engine, length) for length in prompts]
    for response in engine.pipe.stream_infer(texts, gen_config=gen, do_preprocess=False):
        first.add(response.index)
        if started is not None and len(first) == len(prompts):
            started.set()


def measure(engine: LMDeploy, steps: Steps, prompts: list[int], decoding: int) -> dict[str, Any]:
    """Seconds of one round: "alone" and "joined" by the tokens of the prompt, and "decoding"."""
    steps.take()
    for length in prompts:
        answer(engine, [length], 1)
    alone = {tokens: seconds for seconds, tokens, decodes in steps.take() if not decodes}
    started = threading.Event()
    long = threading.Thread(
        target=answer, args=(engine, [BEHIND] * decoding, 8 * len(prompts) + 24, started), daemon=True
    )
    long.start()
    started.wait()
    steps.take()
    for length in prompts:
        answer(engine, [length], 1)
    found = steps.take()
    long.join()
    joined = {tokens: seconds for seconds, tokens, decodes in found if tokens and decodes}
    decoded = [seconds for seconds, tokens, _ in found + steps.take()[:8] if not tokens]
    return {"alone": alone, "joined": joined, "decoding": statistics.median(decoded)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--decoding", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=9)
    add_model_options(parser)
    args = parser.parse_args()
    os.environ["DLINFER_CPU_STEP_SECONDS"] = "60"  # a prompt is one chunk
    most = max(args.decoding)
    engine = LMDeploy(chosen_model(args), False, args.dtype, most + 1, (most + 1) * 8)
    steps, rows = Steps(), []
    for decoding in args.decoding:
        rounds = [measure(engine, steps, args.prompts, decoding) for _ in range(args.rounds + 1)][1:]
        for length in args.prompts:
            whole = [one for one in rounds if length in one["joined"] and length in one["alone"]]
            if not whole:
                raise SystemExit(f"no step joined a prompt of {length} tokens to {decoding} sequences")
            joined = [one["joined"][length] for one in whole]
            parts = [one["alone"][length] + one["decoding"] for one in whole]
            row: dict[str, Any] = {"prompt": length, "decoding": decoding}
            row["alone ms"] = statistics.median(one["alone"][length] for one in whole) * 1e3
            row["decoding ms"] = statistics.median(one["decoding"] for one in whole) * 1e3
            row["joined ms"] = statistics.median(joined) * 1e3
            row["of the parts"] = ratio(joined, parts)
            rows.append(row)
    publish("joined steps", rows)


if __name__ == "__main__":
    main()
