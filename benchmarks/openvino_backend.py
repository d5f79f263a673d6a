"""torch.compile with the engine openvino against torch.compile(backend="openvino"), OpenVINO's own backend.

    python -m benchmarks.openvino_backend [--pairs 15] [--models llama qwen2 mixtral vit] [--layers 4]

For each of transformers' models (random weights) and each backend, in a process of its own: does it work at several
sizes, with what error against eager, which share of the compute nodes OpenVINO gets, how long the first call takes.
Then, for what works, seconds of a call, interleaved. Prints tables, and JSON as last lines.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.arena import Entry, measure
from benchmarks.timing import machine, ratio

MODELS = ("llama", "qwen2", "mixtral", "vit")
BACKENDS = ("dlinfer", "openvino", "openvino-aot")
"""Ours; OpenVINO's by default; OpenVINO's with ``options={"aot_autograd": True}``, as its documents advise for HF."""

FORWARDS = [(2, 16), (1, 33), (4, 7), (2, 64)]
"""(batch, tokens) of calls without a cache; for images the batch counts."""

STEPS = [(2, 16), (2, 1), (2, 1), (2, 1)]
"""(batch, tokens) of calls with one static cache: a prefill and three steps."""

CLOSE = 1e-3


# --- models


def build(name: str, layers: int) -> tuple[Any, bool]:
    """The model, and whether it takes tokens."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        ViTConfig,
        ViTModel,
    )

    torch.manual_seed(0)
    text: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": layers,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
    }
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**text)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**text)),
        "mixtral": lambda: MixtralForCausalLM(
            MixtralConfig(**text, num_local_experts=4, num_experts_per_tok=2)
        ),
        "vit": lambda: ViTModel(
            ViTConfig(
                hidden_size=384, intermediate_size=1536, num_attention_heads=6, num_hidden_layers=layers
            ),
            add_pooling_layer=False,
        ),
    }
    return makers[name]().eval().requires_grad_(False), name != "vit"


class Caller:
    """A model and what torch.compile made of it; ``call`` runs either with a batch and a number of tokens."""

    def __init__(self, backend: str, name: str, layers: int) -> None:
        self.model, self.text = build(name, layers)
        options: dict[str, dict[str, Any]] = {
            "dlinfer": {"engine": "openvino", "fallback": "warn"},
            "openvino": {},
            "openvino-aot": {"aot_autograd": True},
        }
        self.compiled = torch.compile(
            self.model, backend="dlinfer" if backend == "dlinfer" else "openvino", options=options[backend]
        )

    def caches(self) -> dict[Any, Any]:
        """A static cache of its own for each model, with its memory."""
        from transformers import StaticCache

        found = {}
        for model in (self.model, self.compiled):
            config = self.model.config
            cache = found[model] = StaticCache(config, max_cache_len=64)
            width = config.hidden_size // config.num_attention_heads
            cache.early_initialization(
                2, config.num_key_value_heads, width, self.model.dtype, self.model.device
            )
        return found

    @torch.no_grad()
    def call(self, model: Any, batch: int, tokens: int, seed: int, cache: Any = None) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed)
        if not self.text:
            return model(pixel_values=torch.randn(batch, 3, 224, 224, generator=draw)).last_hidden_state
        ids = torch.randint(0, 4096, (batch, tokens), generator=draw)
        if cache is None:
            return model(input_ids=ids, use_cache=False).logits
        return model(input_ids=ids, past_key_values=cache).logits

    def run(self, work: str, batch: int, length: int, tokens: int) -> float:
        """Seconds of a call without a cache, for ``benchmarks.orders``."""
        start = time.perf_counter()
        self.call(self.compiled, batch, length, 0)
        return time.perf_counter() - start


# --- one backend on one model, in a process of its own


class PeersShare:
    """Counts the compute nodes that OpenVINO's backend puts into OpenVINO, and the graphs that it hands to inductor."""

    def __init__(self) -> None:
        self.inside = self.all = self.graphs = self.handed_over = 0
        from openvino.frontend.pytorch.torchdynamo import backend, partition

        made, handed_over = partition.Partitioner.make_partitions, backend.compile_fx

        def make_partitions(self_: Any, graph_module: Any, options: Any) -> Any:
            before = _calls(graph_module)
            after = made(self_, graph_module, options)
            self.graphs += 1
            self.all += before
            self.inside += before - _calls(after)
            return after

        def compile_fx(graph_module: Any, *args: Any, **kwargs: Any) -> Any:
            self.handed_over += 1
            self.graphs += 1
            self.all += _calls(graph_module)
            return handed_over(graph_module, *args, **kwargs)

        vars(partition)["Partitioner"].make_partitions = make_partitions
        backend.compile_fx = compile_fx


def _calls(graph_module: torch.fx.GraphModule) -> int:
    """Nodes that compute: neither views nor getitem."""
    view = (
        "view",
        "reshape",
        "permute",
        "transpose",
        "t.",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "getitem",
    )
    calls = (str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")
    return sum(
        not target.removeprefix("aten.").startswith(view) for target in calls if "getitem" not in target
    )


def check(backend: str, name: str, layers: int) -> dict[str, Any]:
    """What is to be known of one backend on one model; raises what it raises."""
    peers = None if backend == "dlinfer" else PeersShare()
    caller = Caller(backend, name, layers)
    facts: dict[str, Any] = {"first_call_s": 0.0, "error": 0.0}
    start = time.perf_counter()
    caller.call(caller.compiled, *FORWARDS[0], seed=0)
    facts["first_call_s"] = time.perf_counter() - start
    for seed, size in enumerate(FORWARDS):
        _compare(facts, caller, size, seed, {})
    if caller.text:
        caches = caller.caches()
        for seed, size in enumerate(STEPS):
            _compare(facts, caller, size, seed, caches)
    if peers is not None:
        return facts | {
            "graphs": peers.graphs,
            "share": peers.inside / max(1, peers.all),
            "handed_to_inductor": peers.handed_over,
        }
    from dlinfer.graph.report import report

    reports = report.reports()
    inside = sum(len(one.placed("engine")) for one in reports)
    outside = sum(len(one.placed("eager")) for one in reports)
    return facts | {
        "graphs": len(reports),
        "share": inside / max(1, inside + outside),
        "handed_to_inductor": 0,
    }


def _compare(facts: dict[str, Any], caller: Caller, size: tuple[int, int], seed: int, caches: Any) -> None:
    wanted = caller.call(caller.model, *size, seed, caches.get(caller.model))
    found = caller.call(caller.compiled, *size, seed, caches.get(caller.compiled))
    facts["error"] = max(facts["error"], (found - wanted).abs().max().item())


def checked(backend: str, name: str, layers: int) -> dict[str, Any]:
    """``check`` in a process of its own: its facts, or how it ended."""
    command = [sys.executable, "-m", __spec__.name, "--check", backend, name, str(layers)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    except subprocess.TimeoutExpired:
        return {"works": False, "why": "no end after 20 minutes"}
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()] or ["no message"]
        said = next((line for line in reversed(lines) if "Error" in line or "Exception" in line), lines[-1])
        return {"works": False, "why": f"exit {ended.returncode}: {said.strip()[:160]}"}
    facts = json.loads(ended.stdout.splitlines()[-1])
    if not facts["error"] <= CLOSE:
        return facts | {"works": False, "why": f"wrong by {facts['error']:.2g}"}
    return facts | {"works": True, "why": ""}


# --- tables


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--check", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check:
        backend, name, layers = args.check
        facts = check(backend, name, int(layers))
        print(json.dumps(facts), flush=True)
        os._exit(0)  # OpenVINO's threads outlive the interpreter
    found = {
        (name, backend): checked(backend, name, args.layers) for name in args.models for backend in BACKENDS
    }
    table = Table(title="works / crashes, what OpenVINO gets, first call")
    for heading in (
        "model",
        "backend",
        "result",
        "largest error",
        "share of nodes",
        "graphs",
        "first call s",
    ):
        table.add_column(heading)
    for (name, backend), facts in found.items():
        row = [name, backend, "works" if facts["works"] else facts["why"]]
        if "share" in facts:
            share = f"{facts['share']:.1%}"
            if facts["handed_to_inductor"]:
                share += f", {facts['handed_to_inductor']} graphs to inductor"
            row += [f"{facts['error']:.1e}", share, str(facts["graphs"]), f"{facts['first_call_s']:.1f}"]
        table.add_row(*row)
    console = Console(width=180)
    console.print(table)
    rows = [{"model": name, "backend": backend} | facts for (name, backend), facts in found.items()]
    print(json.dumps({"machine": machine(), "rows": rows}))
    if args.pairs:
        _times(console, found, args)


def _times(console: Console, found: dict[tuple[str, str], dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table(title="calls: how often ours fits into the peer's time, median [95 % interval]")
    for heading in ("model", "batch x tokens", "ours ms", "peer", "peer ms", "times faster"):
        table.add_column(heading)
    rows = []
    for name in args.models:
        working = [backend for backend in BACKENDS if found[name, backend]["works"]]
        if "dlinfer" not in working or len(working) < 2:
            continue
        entries = [
            Entry(backend, backend, Path(name), {"layers": args.layers}, "benchmarks.openvino_contender")
            for backend in working
        ]
        orders = [
            {"work": "forward", "batch": b, "length": n, "tokens": 0} for b, n in (FORWARDS[0], FORWARDS[-1])
        ]
        _, results = measure(entries, orders, args.pairs)
        for order, answers in zip(orders, results, strict=True):
            seconds = {who: [one["seconds"] for one in answers[who]] for who in working}
            for peer in working[1:]:
                faster = ratio(seconds[peer], seconds["dlinfer"])
                ms = {who: sorted(seconds[who])[len(seconds[who]) // 2] * 1e3 for who in working}
                size = f"{order['batch']} x {order['length']}"
                table.add_row(name, size, f"{ms['dlinfer']:.1f}", peer, f"{ms[peer]:.1f}", str(faster))
                rows.append(
                    {"model": name, "size": size, "ms": ms, "peer": peer, "times_faster": list(faster)}
                )
    console.print(table)
    print(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
