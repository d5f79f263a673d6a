"""Compare routers: ``python -m benchmarks.routers NAME=COMMAND...``.

A command is the router's; ``{port}`` and ``{urls}`` in it are filled in. The name ``envoy`` alone takes that of
``dlinfer serve``. Three stub servers (``stub.py``) stand behind each router, and:

- every path and error status is asked directly and through the router, and the answers are compared;
- single requests are asked directly and through the router in turn, for what the router adds to their time;
- conversations of one system prompt are held, for how much of each is found in a server's prefix cache;
- a server is killed (SIGKILL) every few seconds and started again, under requests, half of them streams.

It prints one row a router.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil

PATHS = (
    *(
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/generate",
        "/v1/embeddings",
    ),
    *("/v1/encode", "/get_ppl", "/pooling", "/tokenize"),
)
STATUSES = (400, 404, 422, 429, 500, 503)
CHAT = "/v1/chat/completions"
SERVERS = 3
TASK = 'TASK{"tokens": 4, "delay": 0.001}'


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


class Servers:
    """The stubs, which can be killed and started again on their ports."""

    def __init__(self) -> None:
        self.ports = [free_port() for _ in range(SERVERS)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes = [self._start(port) for port in self.ports]

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "benchmarks.routers.stub", str(port)])

    def kill(self, at: int) -> None:
        self.processes[at].send_signal(signal.SIGKILL)
        self.processes[at].wait()

    def start(self, at: int) -> None:
        self.processes[at] = self._start(self.ports[at])

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running(name: str, command: str, urls: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A router: its URL and its process."""
    port = free_port()
    with tempfile.TemporaryDirectory() as text, open(Path(text) / "log", "w") as log:
        if name == "envoy":
            from dlinfer.serve import envoy

            folder = Path(text)
            envoy.write_replicas(folder, urls)
            path = envoy.write_bootstrap(folder, ("127.0.0.1", port), "http://127.0.0.1:1")
            command = f"{command} -c {path} --concurrency 1 --use-dynamic-base-id"
        filled = command.format(port=port, urls=" ".join(urls), metrics=free_port())
        with subprocess.Popen(shlex.split(filled), stdout=log, stderr=log) as process:
            try:
                yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
            finally:
                process.kill()


async def ready(client: aiohttp.ClientSession, url: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(aiohttp.ClientError):
            async with client.post(url + CHAT, json=body) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.2)
    raise SystemExit(f"{url} does not answer")


async def ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """Status, content type and JSON of one request."""
    headers = {"anthropic-version": "2023-06-01", "Content-Type": "application/json"}
    async with client.post(url, data=json.dumps(body), headers=headers) as answer:
        text = await answer.text()
        with contextlib.suppress(ValueError):
            return answer.status, answer.content_type, json.loads(text)
        return answer.status, answer.content_type, text


async def compared(client: aiohttp.ClientSession, url: str) -> tuple[list[str], list[int]]:
    """Paths whose request or answer is another through the router, and error statuses whose body or status is."""
    changed = []
    for path in PATHS:
        body = {"model": "tiny", "stop_token_ids": [3], "of_lmdeploy": 1, "max_tokens": 4}
        body |= {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "input": "hello"}
        status, _, answer = await ask(client, url + path, body)
        # A router may write the JSON anew. It may not drop or add a field or a header.
        if status != 200 or answer["version"] is None or answer["body"] != body:
            changed.append(path)
    errors = []
    for code in STATUSES:
        body = {"model": "tiny", "messages": [{"role": "user", "content": f'TASK{{"status": {code}}}'}]}
        status, _, answer = await ask(client, url + CHAT, body)
        if status != code or not isinstance(answer, dict) or answer.get("message") != f"error {code}":
            errors.append(code)
    return changed, errors


async def added_time(client: aiohttp.ClientSession, url: str, direct: str, count: int) -> tuple[float, float]:
    """What the router adds to one request, in ms: the difference of the medians, and of the 99th percentiles."""
    times: dict[str, list[float]] = {url: [], direct: []}
    for number in range(count):
        for where, seconds in times.items():
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"{number} " + "word " * 400}]}
            begun = time.perf_counter()
            await ask(client, where + CHAT, body)
            seconds.append(time.perf_counter() - begun)
    cuts = {where: statistics.quantiles(seconds, n=100) for where, seconds in times.items()}
    return tuple(1e3 * (cuts[url][at] - cuts[direct][at]) for at in (49, 98))  # pyright: ignore[reportReturnType]


async def prefix_hits(client: aiohttp.ClientSession, url: str, urls: list[str]) -> float:
    """The share of messages that were found in a server's cache, by what one server would have found."""
    for server in urls:
        async with client.get(server + "/forget"):
            pass
    rng = random.Random(0)
    system = {"role": "system", "content": "You are a helpful assistant. " * 40}
    talks = [[system] for _ in range(60)]
    turns = [number for number in range(len(talks)) for _ in range(6)]
    rng.shuffle(turns)

    async def turn(number: int) -> None:
        talk = talks[number]
        talk.append({"role": "user", "content": f"question {len(talk)} of {number} " + "word " * 30 + TASK})
        _, _, answer = await ask(client, url + CHAT, {"model": "tiny", "messages": talk})
        talk.append(answer["choices"][0]["message"])

    for at in range(0, len(turns), 8):
        await asyncio.gather(*(turn(number) for number in set(turns[at : at + 8])))
    found = 0
    for server in urls:
        async with client.get(server + "/count") as answer:
            found += (await answer.json())["found"]
    # One server finds the earlier turns of each conversation, and the system prompt of all but the first one.
    rounds = [len(talk) // 2 for talk in talks]
    return found / (sum(count * (count - 1) for count in rounds) + len(talks) - 1)


async def one(client: aiohttp.ClientSession, url: str, number: int) -> str:
    """What became of one request under kills: a word for the count."""
    stream = number % 2 == 1
    tokens = 20 + number % 20
    expected = " ".join(f"{number}.{token}" for token in range(tokens))
    task = json.dumps({"id": number, "tokens": tokens, "delay": 0.02})
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"{number} TASK{task}"}],
        "stream": stream,
    }
    kind = "stream" if stream else "plain"
    try:
        async with client.post(url + CHAT, json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                return f"{kind} {answer.status}"
    except (aiohttp.ClientError, TimeoutError):
        return f"{kind} broke"
    if not stream:
        return (
            "plain right"
            if json.loads(text)["choices"][0]["message"]["content"] == expected
            else "plain WRONG"
        )
    chunks = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    ended = chunks[-1:] == ["[DONE]"]
    words = [
        json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in chunks if chunk.startswith('{"id')
    ]
    if "".join(words) == expected and ended:
        return "stream right"
    return "stream WRONG, ended as if whole" if ended else "stream cut without an error"


async def under_kills(
    client: aiohttp.ClientSession, url: str, servers: Servers, seconds: float
) -> Counter[str]:
    """Twelve clients ask while one server after another dies and comes back two seconds later."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    numbers = iter(range(10**9))

    async def asks() -> None:
        while time.monotonic() < end:
            counts[await one(client, url, next(numbers))] += 1

    async def kills() -> None:
        at = 0
        while time.monotonic() < end - 4:
            await asyncio.sleep(2)
            servers.kill(at % SERVERS)
            await asyncio.sleep(2)
            servers.start(at % SERVERS)
            at += 1

    await asyncio.gather(kills(), *(asks() for _ in range(12)))
    return counts


async def measure(name: str, command: str, servers: Servers, arguments: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        for server in servers.urls:
            await ready(client, server)
    with running(name, command, servers.urls) as (url, process):
        async with aiohttp.ClientSession(timeout=timeout) as client:
            await ready(client, url)
            await asyncio.sleep(1)
            changed, errors = await compared(client, url)
            p50, p99 = await added_time(client, url, servers.urls[0], arguments.requests)
            hits = await prefix_hits(client, url, servers.urls)
            tree = [process, *process.children(recursive=True)]
            megabytes = sum(part.memory_info().rss for part in tree) >> 20
        async with aiohttp.ClientSession(timeout=timeout) as client:
            counts = await under_kills(client, url, servers, arguments.seconds)
    return {
        "changed paths": changed,
        "changed errors": errors,
        "ms p50": round(p50, 2),
        "ms p99": round(p99, 2),
        "prefix hits": round(hits, 2),
        "MiB": megabytes,
        "under kills": dict(counts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("routers", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30)
    arguments = parser.parse_args()
    for router in arguments.routers:
        name, _, command = router.partition("=")
        servers = Servers()
        try:
            row = asyncio.run(measure(name, command or name, servers, arguments))
        except SystemExit as error:
            row = {"failed": str(error)}
        finally:
            servers.stop()
        print(json.dumps({"router": name} | row), flush=True)


if __name__ == "__main__":
    main()
