"""How long a server keeps others waiting while a long prompt arrives: gaps between the tokens of a stream, and answers
of /health. Shape of Qwen2.5-0.5B.

    python -m benchmarks.streaming [--rounds 5] [--prompt 4096] [--dtype bfloat16 | float32] [-- OPTIONS OF API_SERVER]

Each round streams one chat, sends a prompt of other words when its tokens flow, and measures the longest gap between
two tokens until the prompt's first token. A chunk is timed as a prompt of its size alone. The last line is JSON.
"""

import argparse
import http.client
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.models import add_model_options, chosen_model
from benchmarks.timing import publish
from tests.serve.api_server import MODEL_NAME, REQUEST_SECONDS, ApiServer

WORDS = "the quick brown fox jumps over a lazy dog while two red hens watch and some green frogs sing".split()


def prompt_of(tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    """Text of so many tokens, or a few less: no two rounds have a common beginning, which a cache of prefixes knows."""
    words = [WORDS[(seed * 5 + place * (place + seed)) % len(WORDS)] for place in range(tokens)]
    text = " ".join([str(seed), *words])
    while len(tokenizer.encode(text).ids) > tokens:
        words = words[: len(words) * 99 // 100]
        text = " ".join([str(seed), *words])
    return text


def streamed(port: int, prompt: str, tokens: int) -> Iterator[float]:
    """The times at which tokens arrive."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_SECONDS)
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0.0}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"model": MODEL_NAME}), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {answer.read().decode()}")
    for line in answer:
        if line.startswith(b"data: {") and b'"choices"' in line:
            yield time.monotonic()
    connection.close()


class Health:
    """Asks /health all the time, in a thread; ``longest`` is the slowest answer in seconds, ``bad`` counts others."""

    def __init__(self, port: int) -> None:
        self.port, self.longest, self.bad = port, 0.0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Health":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._end.wait(0.1):
            begun = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
            connection.request("GET", "/health")
            self.bad += connection.getresponse().status != 200
            connection.close()
            self.longest = max(self.longest, time.monotonic() - begun)


def one_round(port: int, tokenizer: Tokenizer, seed: int, prompt: int, chunk: int) -> dict[str, Any]:
    """Seconds of one round."""
    begun = time.monotonic()
    alone = next(iter(streamed(port, prompt_of(tokenizer, chunk, seed), 1))) - begun
    times: list[float] = []
    flows = threading.Event()

    def follow() -> None:
        for moment in streamed(port, prompt_of(tokenizer, 64, seed + 500), 400):
            times.append(moment)
            if len(times) == 8:
                flows.set()
            if over.is_set():
                return

    over = threading.Event()
    stream = threading.Thread(target=follow)
    with Health(port) as health:
        stream.start()
        flows.wait(REQUEST_SECONDS)
        sent = time.monotonic()
        first = next(iter(streamed(port, prompt_of(tokenizer, prompt, seed + 1000), 1)))
        time.sleep(1)
        over.set()
        stream.join()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    meanwhile = [gap for gap, before in zip(gaps, times, strict=False) if sent - gap < before < first]
    quiet = [gap for gap, after in zip(gaps, times[1:], strict=True) if after < sent]
    return {
        "chunk": alone,
        "longest gap": max(meanwhile),
        "usual gap": statistics.median(quiet),
        "tokens meanwhile": len(meanwhile),
        "first token of the prompt": first - sent,
        "health": health.longest,
        "health not 200": health.bad,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512, help="max_prefill_token_num of the server")
    parser.add_argument("options", nargs="*", help="of api_server")
    add_model_options(parser)
    args = parser.parse_args()
    model = chosen_model(args)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    options = ["--max-prefill-token-num", str(args.chunk), "--dtype", args.dtype, *args.options]
    threads = str(torch.get_num_threads())
    with ApiServer(model, *options, session_len=2 * args.prompt, OMP_NUM_THREADS=threads) as server:
        server.ready()
        rounds = [
            one_round(server.port, tokenizer, seed, args.prompt, args.chunk)
            for seed in range(args.rounds + 1)
        ][1:]
    rows = [{name: round(value, 3) for name, value in one.items()} for one in rounds]
    ratios = [one["longest gap"] / one["chunk"] for one in rounds]
    publish(f"a prompt of {args.prompt} in chunks of {args.chunk} beside a stream, seconds", rows)
    worst = {
        "longest gap / chunk, median": round(statistics.median(ratios), 2),
        "largest": round(max(ratios), 2),
        "slowest /health": round(max(one["health"] for one in rounds), 3),
    }
    publish("of all rounds", [worst])


if __name__ == "__main__":
    main()
