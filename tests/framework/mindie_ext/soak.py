"""The example server under load for as long as one likes: random requests, clients that go away, a pool that is too
small, adapters that come and go. ``python -m tests.framework.mindie_ext.soak --seconds 3600``.

Every tenth answer (``--check-every``) is generated once more alone, by a second generator with a pool of its own, and
compared. Where the two part, the logits are computed in float64: if noise of float32's size makes either token of them,
it is a tie, else the answer is wrong. It prints a line a minute, and at the end JSON: requests, answers checked, ties,
wrong ones, cancelled ones, swapped blocks, free blocks, and the resident memory after each tenth of the time. It ends
with 1 where anything was wrong.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from dlinfer.framework.mindie_ext import GenerationParams, GeneratorTorch
from dlinfer.framework.mindie_ext.batch.request import sampling_record
from dlinfer.framework.mindie_ext.sampling.scores import candidates
from examples.batching_server.server import Answer, Server
from examples.tiny_models.build import build
from tests.framework.mindie_ext.generators import Blocks, config_of, run, with_blocks

CLIENTS = 24
ADAPTERS = ("one", "two", "three")
PLACES = 2


@dataclass
class Tally:
    """What happened so far."""

    requests: int = 0
    cancelled: int = 0
    checked: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Soak:
    """One server, its clients, and who loads adapters."""

    def __init__(self, folder: Path, seed: int, check_every: int) -> None:
        self.check_every = check_every
        build("qwen2", folder / "model")
        self.adapters = {name: write_adapter(folder, name) for name in ADAPTERS}
        loras = {"max_loras": PLACES, "max_lora_rank": 8, "max_batch_size": 16}
        self.generator = with_blocks(GeneratorTorch(config_of(folder / "model", **loras)), 40, 24)
        self.alone = with_blocks(GeneratorTorch(config_of(folder / "model", **loras)), 16, 0)
        for generator in (self.generator, self.alone):
            for name in ADAPTERS[:PLACES]:
                generator.load_lora(name, str(self.adapters[name]))
        self.generator.warm_up()
        self.server = Server(self.generator)
        self.folder = folder
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.users: dict[str, int] = dict.fromkeys(ADAPTERS[:PLACES], 0)
        self.to_check: deque[dict[str, Any]] = deque()
        self.over = threading.Event()

    def run(self, seconds: float, requests: int | None) -> dict[str, Any]:
        """Serve for so long, or so many requests; then let all finish."""
        self.server.start()
        clients = [
            threading.Thread(target=self.client, args=(number, requests), daemon=True)
            for number in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        process, start, resident = psutil.Process(), time.monotonic(), []
        while time.monotonic() - start < seconds and any(client.is_alive() for client in clients):
            time.sleep(min(5.0, seconds / 40))
            self.exchange_adapter()
            self.check_some()
            if (time.monotonic() - start) * 10 / seconds >= len(resident) + 1:
                resident.append(process.memory_info().rss >> 20)
            if int(time.monotonic() - start) % 60 < 5:
                self.say(process)
        self.over.set()
        for client in clients:
            client.join(timeout=120)
        self.server.stop()
        while self.to_check:
            self.check_some()
        resident.append(process.memory_info().rss >> 20)
        memory = self.server.memory
        report = {
            "requests": self.tally.requests,
            "cancelled": self.tally.cancelled,
            "checked": self.tally.checked,
            "ties": self.tally.ties,
            "wrong": self.tally.wrong[:10],
            "steps": self.server.steps,
            "swapped_out_blocks": self.server.swapped_out,
            "device_blocks_free": f"{len(memory.device)} of {memory.device.count}",
            "host_blocks_free": f"{len(memory.host)} of {memory.host.count}",
            "sequences_known": len(self.generator.store),
            "compilations": self.generator.model_wrapper.compiled.compilations,
            "clients_alive": sum(client.is_alive() for client in clients),
            "rss_mib": resident,
        }
        whole = len(memory.device) == memory.device.count and len(memory.host) == memory.host.count
        report["passed"] = not self.tally.wrong and whole and not report["sequences_known"]
        return report

    def say(self, process: psutil.Process) -> None:
        tally = self.tally
        rss = process.memory_info().rss >> 20
        text = f"{tally.requests} requests, {tally.cancelled} cancelled, {tally.checked} checked, {rss} MiB"
        print(f"{text}, {len(tally.wrong)} wrong", file=sys.stderr, flush=True)

    def client(self, number: int, requests: int | None) -> None:
        rng = random.Random(1000 + number)
        while not self.over.is_set():
            with self.tally.lock:
                if requests is not None and self.tally.requests >= requests:
                    return
                self.tally.requests += 1
                count = self.tally.requests
                adapter = rng.choice([None, *self.users])
                if adapter is not None:
                    self.users[adapter] += 1
            asked = {
                "prompt": [rng.randrange(5, 900) for _ in range(rng.randrange(1, 120))],
                "new": rng.randrange(1, 80),
                "adapter": adapter,
                "seed": rng.choice([None, rng.randrange(10**6)]),
            }
            answer = self.server.submit(asked["prompt"], params_of(asked), sampling_of(asked))
            killed = rng.random() < 0.2
            tokens = self.read(answer, rng.randrange(1, 20) if killed else None)
            with self.tally.lock:
                if adapter is not None:
                    self.users[adapter] -= 1
                if answer.cancelled:
                    self.tally.cancelled += 1
                if count % self.check_every == 0:
                    self.to_check.append(asked | {"tokens": tokens, "whole": not answer.cancelled})
            time.sleep(rng.random() * 0.05)

    def read(self, answer: Answer, dies_after: int | None) -> list[int]:
        """The tokens that a client sees; one that dies asks for no more, and reads what is still on the way."""
        tokens: list[int] = []
        for token in answer:
            tokens.append(token)
            if dies_after is not None and len(tokens) == dies_after:
                answer.cancel()
        return tokens

    def exchange_adapter(self) -> None:
        """Put an adapter that nobody uses out, and another in."""
        with self.tally.lock:
            idle = [name for name, count in self.users.items() if not count]
            pending = {one["adapter"] for one in self.to_check}
            idle = [name for name in idle if name not in pending]
            if not idle:
                return
            gone = self.rng.choice(idle)
            come = self.rng.choice([name for name in ADAPTERS if name not in self.users])
            del self.users[gone]
            for generator in (self.generator, self.alone):
                generator.unload_lora(gone)
                generator.load_lora(come, str(self.adapters[come]))
            self.users[come] = 0

    def check_some(self) -> None:
        """Generate some answers anew, alone."""
        for _ in range(40):
            if not self.to_check:
                return
            asked = self.to_check[0]
            request = Blocks(16).request(
                10**6,
                asked["prompt"],
                asked["new"],
                sampling_of(asked),
                adapter_id=asked["adapter"],
                seed=asked["seed"],
            )
            (expected,) = run(self.alone, [request])
            tokens = asked["tokens"]
            same = tokens == expected[: len(tokens)] and not (asked["whole"] and tokens != expected)
            if not same and self.is_tie(asked, expected):
                self.tally.ties += 1
            elif not same:
                self.tally.wrong.append(f"{asked}: expected {expected}")
            self.tally.checked += 1
            self.to_check.popleft()

    @torch.no_grad()
    def is_tie(self, asked: dict[str, Any], expected: list[int]) -> bool:
        """Whether rounding decides between the tokens at which two answers part.

        Both have to be drawn from the float64 logits with noise of 1e-5 of the largest: float32 sums of some hundred
        terms, in another order for another batch, are off by 1e-6 of it.
        """
        pairs = zip(asked["tokens"], expected, strict=False)
        place = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        if place is None:
            return False
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder / "model")
        if asked["adapter"] is not None:
            model = PeftModel.from_pretrained(model, str(self.adapters[asked["adapter"]]))
        ids = torch.tensor([asked["prompt"] + expected[:place]])
        logits = model.double().eval()(ids).logits[0, -1]
        generator = torch.Generator().manual_seed(0)
        drawn: set[int] = set()
        for _ in range(400):
            noise = (
                torch.randn(logits.shape, generator=generator, dtype=torch.float64)
                * 1e-5
                * logits.abs().max()
            )
            drawn.add(draw_again(logits + noise, asked["seed"], place))
        return {asked["tokens"][place], expected[place]} <= drawn


def draw_again(logits: torch.Tensor, seed: int | None, place: int) -> int:
    """The token that a sequence's draw number ``place`` makes of logits [vocabulary], in float64."""
    if seed is None:
        return int(logits.argmax())
    record = sampling_of({"seed": seed})
    ordered, ids = candidates(
        logits / float(record["temperature"][0]), int(record["top_k"][0]), float(record["top_p"][0])
    )
    sums = ordered.softmax(0).cumsum(0)
    uniform = float(np.random.Generator(np.random.Philox(key=seed, counter=place)).random())
    return int(ids[min(int(torch.searchsorted(sums, uniform * sums[-1], right=True)), len(ids) - 1)])


def params_of(asked: dict[str, Any]) -> GenerationParams:
    return GenerationParams(
        adapter_id=asked["adapter"], max_new_tokens=asked["new"], seed=asked["seed"], ignore_eos=True
    )


def sampling_of(asked: dict[str, Any]) -> Any:
    """Requests with a seed are drawn, others greedy."""
    return (
        None
        if asked["seed"] is None
        else sampling_record(do_sample=True, temperature=0.9, top_k=40, top_p=0.95)
    )


def write_adapter(folder: Path, name: str) -> Path:
    """An adapter of the attention and MLP of the tiny Qwen 2, with random numbers."""
    targets = ["q_proj", "v_proj", "down_proj"]
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets))
    generator = torch.Generator().manual_seed(len(name))
    for key, tensor in model.named_parameters():
        if "lora_" in key:
            tensor.data = torch.randn(tensor.shape, generator=generator) * 0.3
    model.save_pretrained(str(folder / name))
    return folder / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, default=None, help="end after so many requests")
    parser.add_argument("--check-every", type=int, default=10, help="1 checks all answers")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Soak(Path(folder), given.seed, given.check_every).run(given.seconds, given.requests)
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
