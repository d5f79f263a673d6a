"""What a step costs that joins a chunk of a prompt to decoding sequences, against the two steps apart, in LMDeploy's
engine.

    python -m benchmarks.joined_steps [--chunks 64 128 512] [--decoding 1 8 32] [--rounds 9] [--model FOLDER]

Shape of Qwen2.5-0.5B, with 64 tokens behind each decoding sequence. A prompt has three chunks, and the first of them
never joins. A round measures the other two alone, then starts the sequences and measures them joined. "of the parts" is
the median of the rounds' ratios, joined / (alone + decoding), with its 95 % interval. The last line is JSON.
"""

import argparse
import functools
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

        setattr(PromptPace, "note", note)  # noqa: B010
        setattr(PromptPace, "tokens", lambda pace, seconds, *, decodes: self.chunk)  # noqa: B010
        self.chunk = 0
        """Prompt tokens of a step, from here on."""

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


def measure(engine: LMDeploy, steps: Steps, chunk: int, decoding: int) -> dict[str, float]:
    """Seconds of one round, as medians: "alone", "joined" and "decoding"."""
    steps.chunk = chunk
    steps.take()
    answer(engine, [3 * chunk - 1], 1)
    alone = [seconds for seconds, tokens, _ in steps.take() if tokens == chunk][1:]
    started = threading.Event()
    long = threading.Thread(target=answer, args=(engine, [BEHIND] * decoding, 32, started), daemon=True)
    steps.chunk = BEHIND * (decoding + 1)
    long.start()
    started.wait()
    steps.chunk = chunk
    steps.take()
    answer(engine, [3 * chunk - 1], 1)
    found = steps.take()
    long.join()
    joined = [seconds for seconds, tokens, decodes in found if tokens == chunk and decodes]
    decoded = [seconds for seconds, tokens, _ in found + steps.take()[:8] if not tokens]
    if not (alone and joined and decoded):
        raise SystemExit(f"no step joined {chunk} tokens to {decoding} sequences: {found}")
    parts = {"alone": alone, "joined": joined, "decoding": decoded}
    return {name: statistics.median(seconds) for name, seconds in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 512], help="tokens, at least 64")
    parser.add_argument("--decoding", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=9)
    add_model_options(parser)
    args = parser.parse_args()
    most = max(args.decoding) + 1
    engine = LMDeploy(chosen_model(args), False, args.dtype, most, most * 4 + 3 * max(args.chunks) // 64 + 16)
    steps, rows = Steps(), []
    for decoding in args.decoding:
        for chunk in args.chunks:
            rounds = [measure(engine, steps, chunk, decoding) for _ in range(args.rounds + 1)][1:]
            row: dict[str, Any] = {"chunk": chunk, "decoding": decoding}
            for name in ("alone", "decoding", "joined"):
                row[f"{name} ms"] = statistics.median(one[name] for one in rounds) * 1e3
            parts = [one["alone"] + one["decoding"] for one in rounds]
            row["of the parts"] = ratio([one["joined"] for one in rounds], parts)
            rows.append(row)
    publish("joined steps", rows)


if __name__ == "__main__":
    main()
