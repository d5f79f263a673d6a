"""LMDeploy's server on the CPU under random requests for as long as one likes. ``python -m tests.serve.soak --seconds
1800 [--family qwen2] [--graph] [--images] [--adapters] [-- OPTIONS OF API_SERVER]``.

Chats of a catalogue are asked alone first, greedily, and so are requests of the storm (storm.py), which have stops,
schemas, tools, penalties, seeds, ``n`` and log-probabilities. Then clients ask, all at once and at random: chats and
requests of these catalogues, whose answers have to be those; sampled chats with random options; ones that are given up
in the middle; and ones that have to be refused. It prints a line a minute, and at the end JSON: the counts by kind,
wrong answers, and the server's resident memory after each tenth of the time. It ends with 1 where an answer was wrong,
a request was lost, or the server died.
"""

import argparse
import base64
import http.client
import io
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from examples.tiny_models.build import build
from tests.serve import storm
from tests.serve.api_server import MODEL_NAME, REQUEST_SECONDS, ApiServer

CLIENTS = 8
CHATS, REQUESTS = 40, 100
WORDS = "the quick brown fox jumps over a lazy dog while two red hens watch and some green frogs sing".split()
REFUSED: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"top_p": 2.0},
    {"n": 0},
    {"max_tokens": -3},
    {"repetition_penalty": 0.0},
    {"logprobs": True, "top_logprobs": 10**6},
]


@dataclass
class Tally:
    """What happened so far."""

    asked: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, kind: str, wrong: str = "") -> None:
        with self.lock:
            self.asked[kind] += 1
            if wrong:
                self.wrong.append(f"{kind}: {wrong}")


class Soak:
    """One server and its clients. adapters: names beside the model's; images: whether it takes pictures."""

    def __init__(self, server: ApiServer, seed: int, adapters: list[str], images: bool) -> None:
        self.server, self.tally, self.over = server, Tally(), threading.Event()
        rng = random.Random(seed)
        names = [MODEL_NAME, *adapters]
        self.catalogue = [self.chat(rng, rng.choice(names), images) for _ in range(CHATS)]
        self.expected: list[list[int]] = []
        drawn = (storm.make_request(seed, number) for number in range(REQUESTS))
        self.requests = [(path, body | {"model": rng.choice(names)}) for path, body in drawn]
        self.answers: list[list[dict[str, Any]]] = []
        self.names, self.images = names, images

    def chat(self, rng: random.Random, name: str, images: bool) -> dict[str, Any]:
        """A greedy request: some words, and with ``images`` in every second one to three pictures of other sizes."""
        content: Any = " ".join(rng.choices(WORDS, k=rng.randrange(1, 150)))
        if images and rng.random() < 0.5:
            parts = [
                {"type": "image_url", "image_url": {"url": picture(rng)}} for _ in range(rng.randrange(1, 4))
            ]
            content = [*parts, {"type": "text", "text": content}]
        return {
            "model": name,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": rng.randrange(1, 60),
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def run(self, seconds: float) -> dict[str, Any]:
        self.expected = [self.tokens(chat) for chat in self.catalogue]
        self.answers = [storm.ask(self.server, *request) for request in self.requests]
        clients = [
            threading.Thread(target=self.client, args=(number,), daemon=True) for number in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        start, resident, said = time.monotonic(), [], 0
        while time.monotonic() - start < seconds and any(client.is_alive() for client in clients):
            time.sleep(min(1.0, seconds / 40))
            passed = time.monotonic() - start
            if passed * 10 / seconds >= len(resident) + 1:
                resident.append(self.resident())
            if passed >= 60 * (said + 1):
                said += 1
                text = f"{said} min: {dict(self.tally.asked)}, {len(self.tally.wrong)} wrong, {self.resident()} MiB"
                print(text, file=sys.stderr, flush=True)
        self.over.set()
        for client in clients:
            client.join(timeout=REQUEST_SECONDS)
        alive = self.server.process.poll() is None
        for number in range(len(self.catalogue)) if alive else ():
            self.check(number, "alone, afterwards")
        for number in range(len(self.requests)) if alive else ():
            self.check_request(number, False, "request alone, afterwards")
        resident.append(self.resident())
        return {
            "asked": dict(self.tally.asked),
            "wrong": self.tally.wrong[:20],
            "server_alive": alive,
            "clients_stuck": sum(client.is_alive() for client in clients),
            "rss_mib": resident,
            "passed": alive and not self.tally.wrong and not any(client.is_alive() for client in clients),
        }

    def client(self, number: int) -> None:
        rng = random.Random(1000 + number)
        often = (self.ask_known, self.ask_request)
        kinds = (*often, *often, self.ask_sampled, self.ask_and_leave, self.ask_refused)
        while not self.over.is_set():
            kind = rng.choice(kinds)
            try:
                kind(rng)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.tally.count(kind.__name__, f"{type(error).__name__}: {error}")
                if self.server.process.poll() is not None:
                    return

    def ask_known(self, rng: random.Random) -> None:
        self.check(rng.randrange(len(self.catalogue)), "among others")

    def check(self, number: int, when: str) -> None:
        got = self.tokens(self.catalogue[number])
        same = got == self.expected[number]
        self.tally.count(when, "" if same else f"chat {number}: {got} instead of {self.expected[number]}")

    def ask_request(self, rng: random.Random) -> None:
        self.check_request(rng.randrange(len(self.requests)), rng.random() < 0.3, "request among others")

    def check_request(self, number: int, streams: bool, when: str) -> None:
        path, body = self.requests[number]
        answer = (storm.ask_stream if streams else storm.ask)(self.server, path, body)
        wrong = storm.difference(self.answers[number], answer) or storm.fault(body, answer)
        self.tally.count(when, wrong and f"request {number}: {wrong}")

    def ask_sampled(self, rng: random.Random) -> None:
        chat = self.chat(rng, rng.choice(self.names), self.images) | {
            "temperature": rng.uniform(0.1, 2.0),
            "top_k": rng.choice([0, 1, 5, 40]),
            "top_p": rng.uniform(0.1, 1.0),
            "repetition_penalty": rng.choice([1.0, 1.3]),
            "seed": rng.randrange(10**6),
            "ignore_eos": rng.random() < 0.5,
        }
        got = self.tokens(chat)
        enough = len(got) == chat["max_tokens"] if chat["ignore_eos"] else len(got) <= chat["max_tokens"]
        self.tally.count("sampled", "" if enough else f"{len(got)} tokens of {chat['max_tokens']}")

    def ask_and_leave(self, rng: random.Random) -> None:
        """Read some of a stream, and hang up."""
        path, body = rng.choice([(storm.CHAT, rng.choice(self.catalogue)), rng.choice(self.requests)])
        body = body | {"stream": True, "max_tokens": 200}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=REQUEST_SECONDS)
        try:
            connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            response = connection.getresponse()
            for _ in range(rng.randrange(12)):
                response.readline()
            self.tally.count("left", "" if response.status == 200 else f"status {response.status}")
        finally:
            connection.close()

    def ask_refused(self, rng: random.Random) -> None:
        status, body = self.server.request(
            "POST", storm.CHAT, json.dumps(self.catalogue[0] | rng.choice(REFUSED)).encode()
        )
        self.tally.count("refused", "" if 400 <= status < 500 else f"status {status}: {body[:200]}")

    def tokens(self, chat: dict[str, Any]) -> list[int]:
        status, body = self.server.request("POST", storm.CHAT, json.dumps(chat).encode())
        if status != 200:
            raise ValueError(f"status {status}: {body[:300]}")
        return json.loads(body)["choices"][0]["output_ids"]

    def resident(self) -> int:
        """MiB of the server and all that it started."""
        total = 0
        for process in self.server.alive():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total >> 20


def picture(rng: random.Random) -> str:
    """A data URL of a picture of random size and colours."""
    from PIL import Image

    size = (rng.randrange(28, 120), rng.randrange(28, 120))
    image = Image.frombytes("RGB", size, rng.randbytes(size[0] * size[1] * 3))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def make_adapters(folder: Path, images: bool) -> list[str]:
    """Write two adapters, of other ranks and modules, beside the model in ``folder``; their names."""
    from tests.e2e.peft_job import make

    adapters = {
        "wide": [["q_proj", "k_proj", "v_proj", "o_proj"], 4, 8],
        "narrow": [["v_proj", "o_proj"], 8, 4],
    }
    for name in adapters:
        make(
            {"model": str(folder / "model"), "out": str(folder), "adapters": adapters, "vision": images}, name
        )
    return list(adapters)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--graph", action="store_true", help="compiled graphs; without it eagerly")
    parser.add_argument("--adapters", action="store_true", help="two LoRA adapters beside the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="more options of api_server, behind --")
    args = parser.parse_args()
    options = [*storm.ANSWERS, *args.options, *([] if args.graph else ["--eager-mode"])]
    with tempfile.TemporaryDirectory() as folder:
        build(args.family, Path(folder, "model"))
        names = make_adapters(Path(folder), args.images) if args.adapters else []
        if names:
            options += ["--adapters", *(f"{name}={Path(folder, name)}" for name in names)]
        with ApiServer(Path(folder, "model"), *options, session_len=storm.SESSION_LEN) as server:
            server.ready()
            report = Soak(server, args.seed, names, args.images).run(args.seconds)
            if not report["server_alive"]:
                print(server.output()[-6000:], file=sys.stderr)
    print(json.dumps(report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
