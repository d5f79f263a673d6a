"""Whether a request has the same tokens and logprobs, bit for bit, alone and in random batches of LMDeploy's engine.

    DLINFER_CPU_BATCH_INVARIANT=1 python -m benchmarks.batch_invariance [--batches 1000] [--families qwen2]
    python -m benchmarks.batch_invariance --price [--pairs 15] [--dtype bfloat16 | float32] [--model FOLDER]

Without DLINFER_CPU_BATCH_INVARIANT=1 the first shows how many batches differ. Its requests differ in prompt, length and
sampling, share beginnings, and continue what others said. Each is answered alone first. Then random batches of them
arrive at random times, at engines that read prompts whole, read them in chunks, preempt, or keep prefixes, eagerly and
in graph mode. The second compares the mode's time with the default's, on the shape of Qwen2.5-0.5B in graph mode.
The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.contender import LMDeploy
from benchmarks.models import FOLDER, add_model_options, chosen_model
from benchmarks.timing import publish, ratio
from dlinfer import settings

ENGINES: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"max_prefill_token_num": 48},
    "few blocks": {"num_gpu_blocks": 40},
    "prefixes": {"enable_prefix_caching": True},
    "all of these": {"max_prefill_token_num": 48, "num_gpu_blocks": 48, "enable_prefix_caching": True},
}
"""Name -> options of PytorchEngineConfig that change how a batch is cut."""

COMMON: dict[str, Any] = {
    "device_type": "cpu",
    "session_len": 320,
    "block_size": 16,
    "num_gpu_blocks": 800,
    "max_batch_size": 16,
    "logprobs_mode": "raw_logprobs",
}
MOST = 16
"""Requests of a batch."""

WORK: list[dict[str, Any]] = [
    {"work": "decode", "batch": 1, "length": 8, "tokens": 24},
    {"work": "decode", "batch": 8, "length": 8, "tokens": 12},
    {"work": "prefill", "batch": 1, "length": 256, "tokens": 1},
    {"work": "requests", "batch": 4, "length": 0, "tokens": 0},
]


class Request(NamedTuple):
    """prompt: token ids. options: of GenerationConfig."""

    prompt: list[int]
    options: dict[str, Any]


class Answer(NamedTuple):
    """tokens: of the answer. logprobs: of each step, (token, bits of its log-probability)."""

    tokens: list[int]
    logprobs: list[list[tuple[int, str]]]


def requests(draw: random.Random, count: int, vocabulary: int) -> list[Request]:
    """``count`` requests: some of their prompts begin alike, some are drawn and some greedy."""
    beginnings = [draw.choices(range(10, vocabulary), k=length) for length in (16, 40, 100)]
    found = []
    for number in range(count):
        length = draw.choice((1, 2, 7, 17, 33, 64, 100, 150))
        prompt = draw.choice([[], *beginnings]) + draw.choices(range(10, vocabulary), k=length)
        options: dict[str, Any] = {
            "max_new_tokens": draw.choice((1, 4, 12, 24)),
            "ignore_eos": True,
            "logprobs": 3,
        }
        if number % 3:
            options |= {
                "do_sample": True,
                "random_seed": number,
                "temperature": 0.9,
                "top_k": number % 2 * 20,
            }
            options["top_p"] = draw.choice((1.0, 0.9))
        found.append(Request(prompt, options))
    return found


def continued(
    draw: random.Random, asked: list[Request], said: list[Answer], vocabulary: int
) -> list[Request]:
    """For each third request another one, which goes on behind its answer as the next turn of a conversation does."""
    more = []
    for request, answer in list(zip(asked, said, strict=True))[::3]:
        prompt = request.prompt + answer.tokens + draw.choices(range(10, vocabulary), k=5)
        more.append(Request(prompt, request.options))
    return more


async def _ask(pipe: Any, request: Request, delay: float) -> Answer:
    from lmdeploy import GenerationConfig

    await asyncio.sleep(delay)
    engine = pipe.async_engine
    made = await engine.preprocess(
        None, pipe.session(), gen_config=GenerationConfig(**request.options), input_ids=request.prompt
    )
    tokens: list[int] = []
    logprobs: list[list[tuple[int, str]]] = []
    async for response in engine.generate(made):
        tokens += response.token_ids
        steps = response.logprobs or []
        logprobs += [sorted((token, float(value).hex()) for token, value in step.items()) for step in steps]
    return Answer(tokens, logprobs)


def ask(pipe: Any, asked: list[Request], delays: list[float]) -> list[Answer]:
    """The answers to requests that arrive at these times, in seconds from now."""

    async def together() -> list[Answer]:
        return await asyncio.gather(*map(_ask, [pipe] * len(asked), asked, delays))

    return pipe._run(coro=together()).result()


def batches(
    pipe: Any, draw: random.Random, pool: list[Request], alone: list[Answer], count: int
) -> Iterator[list[int]]:
    """For each of ``count`` random batches, the requests whose answer is another than alone."""
    for _ in range(count):
        chosen = draw.sample(range(len(pool)), draw.randint(2, min(MOST, len(pool))))
        longest = draw.choice((0.0, 0.02, 0.1))
        said = ask(pipe, [pool[i] for i in chosen], [draw.uniform(0, longest) for _ in chosen])
        yield [i for i, answer in zip(chosen, said, strict=True) if answer != alone[i]]


def pipeline(model: Path, **options: Any) -> Any:
    from lmdeploy import PytorchEngineConfig
    from lmdeploy import pipeline as started

    config = PytorchEngineConfig(**COMMON | options)
    return started(str(model), backend_config=config)  # pyright: ignore[reportCallIssue]


def measure(model: Path, draw: random.Random, count: int, pool_size: int) -> list[dict[str, Any]]:
    """A row for each engine, which takes its part of ``count`` batches."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    rows = []
    for eager in (True, False):
        pool, alone = requests(draw, pool_size, vocabulary), list[Answer]()
        for name, options in ENGINES.items():
            with pipeline(model, eager_mode=eager, **options) as pipe:
                if not alone:
                    alone = [ask(pipe, [one], [0.0])[0] for one in pool]
                    more = continued(draw, pool, alone, vocabulary)
                    alone += [ask(pipe, [one], [0.0])[0] for one in more]
                    pool = pool + more
                start = time.perf_counter()
                share = count // (2 * len(ENGINES))
                differing = list(batches(pipe, draw, pool, alone, share))
                rows.append(
                    {
                        "model": model.name,
                        "mode": "eager" if eager else "graph",
                        "engine": name,
                        "batches": share,
                        "equal": sum(not found for found in differing),
                        "answers that differ": sum(map(len, differing)),
                        "seconds": round(time.perf_counter() - start, 1),
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def price(args: argparse.Namespace) -> None:
    """Print the time of each work with the mode, and how many times as long it takes as without.

    One engine does both in turns: only the kernels differ. CPU time is the process's, whatever else the machine does.
    """
    engine = LMDeploy(chosen_model(args), False, args.dtype)
    switch = torch.ops.dlinfer_cpu.set_batch_invariant.default
    rows = []
    for work in WORK:
        cpu: dict[bool, list[float]] = {False: [], True: []}
        wall: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(-1, args.pairs):
            for on in (False, True) if turn % 2 else (True, False):
                switch(on)
                before = time.process_time()
                found = engine.run(**work)
                if turn >= 0:
                    cpu[on].append(time.process_time() - before)
                    wall[on].append(found["seconds"] if isinstance(found, dict) else found)
            print(f"{work}: {turn + 1} of {args.pairs} rounds", file=sys.stderr, flush=True)
        named = f"{work['work']} {work['batch']}" + (f" x {work['length']}" if work["length"] else "")
        rows.append(
            {
                "work": named,
                "CPU s": statistics.median(cpu[False]),
                "invariant CPU s": statistics.median(cpu[True]),
                "times the CPU time": ratio(cpu[True], cpu[False]),
                "times as long": ratio(wall[True], wall[False]),
            }
        )
    publish(f"price of batch invariance, {args.dtype}", rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=1000, help="of all models together")
    parser.add_argument("--families", nargs="+", default=["qwen2"], help="of examples.tiny_models")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--pool", type=int, default=24, help="different requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--price", action="store_true", help="measure time in place of bits")
    parser.add_argument("--pairs", type=int, default=15)
    add_model_options(parser)
    args = parser.parse_args()
    if args.price:
        price(args)
        return
    from examples.tiny_models.build import build

    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    models = [(family, dtype) for family in args.families for dtype in args.dtypes]
    for family, dtype in models:
        folder = FOLDER.with_name(f"tiny-{family}-{dtype}")
        build(family, folder, 0, dtype)
        rows += measure(folder, random.Random(args.seed), args.batches // len(models), args.pool)
    publish(f"batch invariance, {'on' if settings.current().cpu_batch_invariant else 'off'}", rows)
    print(
        f"{sum(row['equal'] for row in rows)} of {sum(row['batches'] for row in rows)} batches are equal",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
