"""``dlinfer serve`` with LMDeploy's own servers, under kills: ``python -m benchmarks.replicas [--requests 2000]``.

Three replicas of a tiny model serve: as many as there are cores, and the rest joined as those of another machine.

- Requests, half of them streams, while a replica is killed (SIGKILL) every 20 seconds. Each answer is compared with the
  one that the same prompt got alone.
- Conversations of several turns: prompt tokens found in the prefix caches, by what one server with a cache of the same
  total size finds.
- Single requests sent to a replica and to the router in turn: what the router adds.

It prints JSON, and ends with 1 where an answer was wrong, cut without an error, or missing.
"""

import argparse
import asyncio
import contextlib
import json
import random
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

from dlinfer.serve.replica import health
from dlinfer.vendor.cpu.host.cpus import usable_cpus
from examples.tiny_models.build import build

CHAT = "/v1/chat/completions"
WORDS = "the quick brown fox jumps over a lazy dog while two red hens watch and some green frogs sing".split()
REPLICAS, BLOCKS = 3, 120
PROMPTS = 60
OPTIONS = (
    "--model-name",
    "tiny",
    "--session-len",
    "2048",
    "--max-batch-size",
    "8",
    "--enable-prefix-caching",
)


class Serve:
    """One ``dlinfer serve``, its log in a file."""

    def __init__(self, folder: Path, model: Path, blocks: int, replicas: int, *options: str) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self.port = held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"log{self.port}"
        command = [
            sys.executable,
            "-m",
            "dlinfer",
            "serve",
            str(model),
            "--replicas",
            str(replicas),
            *OPTIONS,
        ]
        command += [
            "--server-name",
            "127.0.0.1",
            "--server-port",
            str(self.port),
            "--num-gpu-blocks",
            str(blocks),
        ]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen([*command, *options], stdout=log, stderr=log)

    def ready(self) -> None:
        end = time.monotonic() + 600
        while "ready at" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(self.log.read_text()[-4000:])
            time.sleep(0.2)

    def servers(self) -> list[psutil.Process]:
        """Processes of LMDeploy's servers; their engines are their children."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "api_server" in child.cmdline()]

    def urls(self) -> list[str]:
        lines = [
            line for line in self.log.read_text().splitlines() if ": replica " in line and "http://" in line
        ]
        return [line.split("replica ")[1].split(": ", 1)[1].split(",")[0] for line in lines]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(120)
        self.process.kill()
        return -9


def prompts() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(3, 40))) + f" {number}" for number in range(PROMPTS)]


def body_of(prompt: str, stream: bool) -> dict[str, Any]:
    tokens = 16 + len(prompt) % 48
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens, "stream": stream}
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **sampling}


async def answer_of(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, str]:
    """(text, how it ended). The end is ``whole``, a status, or ``broke``; ``cut`` is an end without an error."""
    try:
        async with client.post(url + CHAT, json=body) as answer:
            raw = await answer.text()
            if answer.status != 200:
                return raw, str(answer.status)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return str(error), "broke"
    if not body["stream"]:
        choice = json.loads(raw)["choices"][0]
        return choice["message"]["content"], "whole" if choice["finish_reason"] == "length" else "cut"
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    whole = "data: [DONE]" in raw and any(choice.get("finish_reason") == "length" for choice in choices)
    return "".join(choice["delta"].get("content") or "" for choice in choices), "whole" if whole else "cut"


async def under_kills(main: Serve, all_serves: list[Serve], count: int, pause: float) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    texts = prompts()
    wrong: list[dict[str, Any]] = []
    back: list[float] = []
    numbers = iter(range(count))
    done = asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as client:
        alone = {text: await answer_of(client, main.url, body_of(text, False)) for text in texts}
        assert {end for _, end in alone.values()} == {"whole"}, alone

        async def asks() -> None:
            for number in numbers:
                text, stream = texts[number % PROMPTS], bool(number // PROMPTS % 2)
                got, end = await answer_of(client, main.url, body_of(text, stream))
                if end == "whole" and got != alone[text][0]:
                    end = "wrong"
                    wrong.append({"prompt": text, "got": got, "alone": alone[text][0]})
                counts[f"{'stream' if stream else 'plain'} {end}"] += 1

        async def kills() -> None:
            """Kill a replica that serves, again and again, as long as another one serves."""
            urls = [url for serve in all_serves for url in serve.urls()]
            killed: dict[str, float] = {}
            since: dict[str, float] = {}
            due = time.monotonic() + pause
            while not done.is_set():
                await asyncio.sleep(0.5)
                now = time.monotonic()
                since = {url: since.get(url, now) for url in urls if await health(url)}
                for url in set(since) & set(killed):
                    back.append(round(now - killed.pop(url), 1))
                serving = [url for url, when in since.items() if now - when > 5]  # the router knows it
                if time.monotonic() < due or len(serving) < 2:
                    continue
                url = serving[counts["kills"] % len(serving)]
                port = url.rpartition(":")[2]
                servers = [server for serve in all_serves for server in serve.servers()]
                next(server for server in servers if server.cmdline()[-1] == port).kill()
                killed[url] = time.monotonic()
                counts["kills"] += 1
                due = time.monotonic() + pause

        killer = asyncio.create_task(kills())
        await asyncio.gather(*(asks() for _ in range(12)))
        done.set()
        await killer
    kills_made = counts.pop("kills", 0)
    return {"answers": dict(counts), "wrong": wrong[:3], "kills": kills_made, "seconds until back": back}


async def cached_tokens(client: aiohttp.ClientSession, urls: list[str]) -> float:
    """Prompt tokens that were found in prefix caches so far."""
    total = 0.0
    for url in urls:
        async with client.get(f"{url}/metrics") as answer:
            page = await answer.text()
        total += sum(
            float(line.split()[-1])
            for line in page.splitlines()
            if line.startswith("lmdeploy:cached_tokens_total{")
        )
    return total


async def talks(url: str, servers: list[str], conversations: int, turns: int) -> float:
    """Hold conversations, four at a time; the prompt tokens that caches had."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as client:
        before = await cached_tokens(client, servers)
        limit = asyncio.Semaphore(4)

        async def talk(number: int) -> None:
            rng = random.Random(number)
            messages = [{"role": "system", "content": " ".join(WORDS * 3)}]
            for turn in range(turns):
                question = " ".join(rng.choices(WORDS, k=40))
                messages.append({"role": "user", "content": f"{number} {turn} {question}"})
                async with limit:
                    text, end = await answer_of(client, url, body_of("", False) | {"messages": messages})
                assert end == "whole", text
                messages.append({"role": "assistant", "content": text})
                await asyncio.sleep(0.05)

        await asyncio.gather(*(talk(number) for number in range(conversations)))
        return await cached_tokens(client, servers) - before


async def added_time(url: str, direct: str, count: int) -> dict[str, float]:
    times: dict[str, list[float]] = {url: [], direct: []}
    async with aiohttp.ClientSession() as client:
        for number in range(count):
            for where in (url, direct) if number % 2 else (direct, url):
                begun = time.perf_counter()
                async with client.get(f"{where}/v1/models") as answer:
                    await answer.read()
                times[where].append(1e3 * (time.perf_counter() - begun))
    added: dict[int, list[float]] = {49: [], 89: [], 98: []}
    for at in range(0, count, 300):  # the median over blocks, so that other work on the machine weighs less
        cuts = {where: statistics.quantiles(values[at : at + 300], n=100) for where, values in times.items()}
        for place, values in added.items():
            values.append(cuts[url][place] - cuts[direct][place])
    return {f"p{place + 1}": round(statistics.median(values), 2) for place, values in added.items()}


@contextlib.contextmanager
def served(folder: Path, model: Path) -> Iterator[list[Serve]]:
    """Three replicas: those that the cores allow, and the rest joined."""
    key = folder / "key"
    key.write_text("a secret")
    here = min(REPLICAS, usable_cpus().cores)
    serves = [Serve(folder, model, BLOCKS, here, "--join-key", str(key))]
    try:
        serves[0].ready()
        if here < REPLICAS:
            join = ("--join", serves[0].url, "--join-key", str(key))
            serves.append(Serve(folder, model, BLOCKS, REPLICAS - here, *join))
            serves[1].ready()
            time.sleep(3)
        yield serves
    finally:
        statuses = [serve.stop() for serve in reversed(serves)]
        print(json.dumps({"exit statuses": statuses}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pause", type=float, default=20, help="seconds between kills")
    parser.add_argument("--conversations", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        build("llama", folder / "model")
        found = {}
        with served(folder, folder / "model") as serves:
            urls = [url for serve in serves for url in serve.urls()]
            found["replicas"] = asyncio.run(talks(serves[0].url, urls, arguments.conversations, 5))
            print(json.dumps({"ms added": asyncio.run(added_time(serves[0].url, urls[0], 1500))}), flush=True)
            row = asyncio.run(under_kills(serves[0], serves, arguments.requests, arguments.pause))
            print(json.dumps(row), flush=True)
        alone = Serve(folder, folder / "model", REPLICAS * BLOCKS, 1)
        try:
            alone.ready()
            found["one server"] = asyncio.run(talks(alone.url, [alone.url], arguments.conversations, 5))
        finally:
            alone.stop()
    print(
        json.dumps({"cached tokens": found, "hits of one server's": found["replicas"] / found["one server"]})
    )
    ends = set(row["answers"]) - {"plain whole", "stream whole", "stream broke"}
    return 1 if ends else 0


if __name__ == "__main__":
    raise SystemExit(main())
