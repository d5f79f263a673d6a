"""Requests that arrive together at an OpenAI server: LMDeploy on the vendor cpu against vLLM's CPU build, and against
other versions of dlinfer.

    python -m benchmarks.servers [--concurrency 4 16 32] [--prompt 1000 --answer 2] [--pairs 5]
                                 [--version NAME=CHECKOUT ...] [--under NAME=COMMAND ...] [--no-vllm]

All servers stay loaded and take turns, each with the same threads, weights and prompts. Prompts have 32 to 700 tokens
and answers 16 to 96, or as many as the options say, streamed from /v1/completions. It prints throughput with the
median ratio and its 95 % interval, and the times to the first token and between pieces of an answer. The last line is
JSON.
"""

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import math
import os
import random
import shlex
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tokenizers import Tokenizer

from benchmarks.models import add_model_options, chosen_model
from benchmarks.peers.environments import python_of
from benchmarks.requests import Arrivals, mixed
from benchmarks.streaming import prompt_of
from benchmarks.timing import publish, ratio, threads
from tests.serve.processes import LMDEPLOY, ProcessTree

OURS, VLLM = "dlinfer", "vLLM"
NAME = "model"
MOST, LENGTH = 32, 2048
"""Requests in a batch, and tokens of a request."""
START_SECONDS, REQUEST_SECONDS = 900, 600


class Server(ProcessTree):
    """A server of one contender, which has answered once."""

    def __init__(self, name: str, command: list[str], **environment: str) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self.port = held.getsockname()[1]
        self.name = name
        super().__init__([*command, str(self.port)], **environment)

    def ready(self) -> float:
        """Wait until the server answers. Return the seconds since its start. Raises SystemExit if it ends."""
        while self.process.poll() is None and time.monotonic() < self.started + START_SECONDS:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                connection.request("GET", "/v1/models")
                if connection.getresponse().status == 200:
                    return time.monotonic() - self.started
            time.sleep(0.2)
        raise SystemExit(f"{self.name} does not answer:\n{self.output()[-6000:]}")

    def __exit__(self, *exc_info: object) -> None:
        processes = self.processes()
        super().__exit__(*exc_info)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Return its processes. Those of vLLM overwrite the environment that ProcessTree looks for."""
        if not psutil.pid_exists(self.process.pid):
            return []
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def resident(self) -> int:
        """Return the bytes of memory that its processes hold alone."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().uss
        return total


def lmdeploy(name: str, model: Path, dtype: str, checkout: str = "", under: str = "") -> Server:
    """LMDeploy's api_server on the CPU.

    checkout: the folder of another version of dlinfer. under: a command that runs the server, such as "taskset -c 0".
    """
    command = [
        "env",
        "-u",
        "OMP_NUM_THREADS",
        *shlex.split(under),
        LMDEPLOY,
        "serve",
        "api_server",
        str(model),
        "--backend",
        "pytorch",
        "--device",
        "cpu",
    ]
    command += ["--model-name", NAME, "--dtype", dtype, "--session-len", str(LENGTH)]
    command += ["--max-batch-size", str(MOST), "--server-name", "127.0.0.1", "--server-port"]
    return Server(name, command, **({"PYTHONPATH": checkout} if checkout else {}))


def vllm(model: Path, dtype: str) -> Server:
    """vLLM's server, in an environment of its own."""
    command = [str(Path(python_of("vllm")).with_name("vllm")), "serve", str(model), "--dtype", dtype]
    command += ["--served-model-name", NAME, "--max-model-len", str(LENGTH), "--max-num-seqs", str(MOST)]
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[: threads()]))
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    return Server(VLLM, [*command, "--host", "127.0.0.1", "--port"], **variables)


async def ask(port: int, prompts: list[str], answers: list[int]) -> dict[str, Any]:
    """Send all requests at once. Return what ``Arrivals`` tells of them; a piece of an answer counts as a token."""
    pieces = Arrivals(len(prompts))

    async def one(session: aiohttp.ClientSession, number: int) -> int:
        body = {"model": NAME, "prompt": prompts[number], "max_tokens": answers[number], "ignore_eos": True}
        body |= {"stream": True, "temperature": 0.0, "stream_options": {"include_usage": True}}
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"{answer.status}: {await answer.text()}")
            tokens = 0
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    pieces.note(number, int(bool(choice["text"]) or not choice.get("finish_reason")))
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
            return tokens

    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        told = await asyncio.gather(*(one(session, number) for number in range(len(prompts))))
    if list(told) != answers:
        raise SystemExit(f"the server counts {told} tokens, and was asked for {answers}")
    result = pieces.answer()
    return result | {"seconds": time.perf_counter() - pieces.begun, "tokens": sum(told)}


def rows_of(rounds: dict[str, list[dict[str, Any]]], servers: list[Server]) -> list[dict[str, Any]]:
    """A row for each contender."""
    rows = []
    for server in servers:
        found, ours = rounds[server.name], rounds[OURS]
        row: dict[str, Any] = {"contender": server.name}
        row["tok/s"] = statistics.median(one["tokens"] / one["seconds"] for one in found)
        row["prompt tok/s"] = statistics.median(one["prompt tokens"] / one["seconds"] for one in found)
        row["ours is faster by"] = ratio([one["seconds"] for one in found], [one["seconds"] for one in ours])
        for kind, title in (("first", "first token s"), ("gap", "between s")):
            for cut in ("p50", "p90", "p99"):
                value = statistics.median(one[kind][cut] for one in found)
                row[f"{title} {cut}"] = None if math.isnan(value) else round(value, 3)
        row["memory GiB"] = round(server.resident() / 2**30, 2)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=(4, 16, 32))
    parser.add_argument("--prompt", type=int, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, help="tokens of each answer")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--version", action="append", default=[], help="NAME=FOLDER of another version's checkout"
    )
    parser.add_argument(
        "--under", action="append", default=[], help="NAME=COMMAND that runs our server, as taskset does"
    )
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    add_model_options(parser)
    args = parser.parse_args()
    model = chosen_model(args)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    begin = [lambda: lmdeploy(OURS, model, args.dtype)]
    for version in args.version:
        name, _, folder = version.partition("=")
        begin.append(
            lambda name=name, folder=folder: lmdeploy(
                name, model, args.dtype, checkout=str(Path(folder).resolve())
            )
        )
    for run in args.under:
        name, _, command = run.partition("=")
        begin.append(lambda name=name, command=command: lmdeploy(name, model, args.dtype, under=command))
    if not args.no_vllm:
        begin.append(lambda: vllm(model, args.dtype))
    draw, seeds = random.Random(0), itertools.count()
    with contextlib.ExitStack() as stack:
        servers = []
        for start in begin:
            servers.append(stack.enter_context(start()))
            print(f"{servers[-1].name}: ready after {servers[-1].ready():.0f} s", flush=True)
        for count in args.concurrency:
            rounds: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
            sizes = [(args.prompt or prompt, args.answer or answer) for prompt, answer in mixed(count)]
            for turn in range(-1, args.pairs):
                prompts = [prompt_of(tokenizer, length, next(seeds)) for length, _ in sizes]
                for server in draw.sample(servers, len(servers)):
                    result = asyncio.run(ask(server.port, prompts, [tokens for _, tokens in sizes]))
                    result["prompt tokens"] = sum(length for length, _ in sizes)
                    if turn >= 0:
                        rounds[server.name].append(result)
            shape = f" of {args.prompt or 'mixed'} tokens, {args.answer or 'mixed'} in an answer"
            publish(f"{count} requests at once{shape}, {args.dtype}", rows_of(rounds, servers))


if __name__ == "__main__":
    main()
