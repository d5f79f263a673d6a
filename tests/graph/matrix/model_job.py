"""One architecture of the model matrix, in a process of its own: ``python -m tests.graph.matrix.model_job NAME``.

Runs every call eagerly, with ``--baseline`` and with ``--backend``, and prints one JSON object: errors, compilations
and graph breaks. It judges nothing; ``verdict.py`` does.
"""

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from dlinfer.graph.report.report import reports
from dlinfer.graph.report.report import reset as reset_reports
from tests.graph.matrix import calls
from tests.graph.matrix.backends import compiler
from tests.graph.matrix.models import ARCHITECTURES, Architecture, build
from tests.graph.matrix.observer import Observer, first_line, shapes_of, varying_dimensions

SWEEPS = 2
"""The second sweep has other numbers and fresh caches of the same sizes: nothing is left to compile for it."""

Answers = list[tuple[str, torch.Tensor]]


def sweep(architecture: Architecture, model: Any, seed: int, forward: Callable[..., Any]) -> Answers:
    """Every call of the plan at every size: the results by name, such as ``3x8 decode 2``."""
    answers = []
    for batch, length in calls.sizes():
        rng = torch.Generator().manual_seed(seed)

        def labelled(phase: str, size: str = f"{batch}x{length}", **inputs: Any) -> Any:
            return forward(f"{size} {phase}", inputs)

        plan = calls.PLANS[architecture.inputs](architecture, model, labelled, (batch, length), rng)
        # A result may be a view of the cache or be reused by the next call.
        answers += [(f"{batch}x{length} {name}", value.clone()) for name, value in plan]
    return answers


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest number in ``want``; infinite where shapes or NaNs differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    if not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    scale = want.abs().max().clamp_min(1e-6)
    return float(((got - want).abs().max() / scale).nan_to_num(float("inf")))


def compiled_run(
    architecture: Architecture, model: Any, backend: str, expected: list[Answers], varying: set
) -> dict:
    """Sweeps through ``torch.compile`` with default settings, compared with eager's answers."""
    observer = Observer(varying)
    reset_reports()
    compiled = torch.compile(model, backend=compiler(backend))
    result: dict[str, Any] = {"backend": backend, "error": "", "max_error": 0.0, "wrong": [], "compared": 0}
    sweeps_compilations = []

    def forward(call: str, inputs: dict[str, Any]) -> Any:
        with observer.watch(call, inputs):
            return compiled(**inputs)

    start = time.monotonic()
    try:
        for seed, answers in enumerate(expected):
            before = len(observer.trace.compilations)
            compare(sweep(architecture, model, seed, forward), answers, result)
            sweeps_compilations.append(len(observer.trace.compilations) - before)
    except Exception as cause:  # noqa: BLE001  whatever breaks is this architecture's result
        inner = cause.inner_exception if isinstance(cause, BackendCompilerFailed) else cause
        result["error"] = f"{type(inner).__name__}: {first_line(str(inner))[:400]}"
        traceback.print_exception(cause, file=sys.stderr)
    result["seconds"] = round(time.monotonic() - start, 1)
    result["sweeps"] = sweeps_compilations
    result["report"] = read_report()
    result |= observer.trace.as_json()
    return result


def read_report() -> dict[str, Any]:
    """What dlinfer says of the graphs that it compiled: where computing nodes run, and what is not in the engine."""
    found: Counter[str] = Counter()
    kernels = in_clusters = 0
    graphs = reports()
    for graph in graphs:
        if graph.refused:
            found[f"a graph: {graph.refused}"] += 1
        for node in graph.placed("eager"):
            found[f"{node.op}: {node.reason}"] += 1
        for cluster in (cluster for region in graph.regions for cluster in region.clusters):
            if cluster.origin == "eager":
                found[
                    f"a cluster of {cluster.nodes} nodes: {cluster.reason or 'assumptions do not hold'}"
                ] += 1
        kernels += sum(node.how.startswith("kernel") for node in graph.placed("engine"))
        in_clusters += sum(node.how.startswith("cluster") for node in graph.placed("engine"))
    fallbacks = [f"{what} ({count} times)" for what, count in found.items()]
    return {"graphs": len(graphs), "kernels": kernels, "in_clusters": in_clusters, "fallbacks": fallbacks}


def compare(got: Answers, want: Answers, result: dict[str, Any]) -> None:
    assert [name for name, _ in got] == [name for name, _ in want]
    for (name, mine), (_, eager) in zip(got, want, strict=True):
        result["compared"] += 1
        off = error(mine, eager)
        result["max_error"] = max(result["max_error"], off)
        if off > TOLERANCE:
            result["wrong"].append(f"{name}: {off:.2g}")


TOLERANCE = 1e-4
"""Of float32 results relative to the largest number of the tensor. Sums of some hundred terms in another order give
1e-6 to 1e-5 after these few layers; a wrong mask, position or weight gives more than 1e-2."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[architecture.name for architecture in ARCHITECTURES])
    parser.add_argument("--backend", default="dlinfer")
    parser.add_argument("--baseline", default="aot_eager")
    options = parser.parse_args()
    architecture = next(item for item in ARCHITECTURES if item.name == options.name)

    torch.set_num_threads(1)
    model = build(architecture)
    shapes: list[dict[str, tuple[int, ...]]] = []

    def eager(_: str, inputs: dict[str, Any]) -> Any:
        shapes.append(shapes_of(inputs))
        return model(**inputs)

    with torch.no_grad():
        expected = [sweep(architecture, model, seed, eager) for seed in range(SWEEPS)]
        varying = varying_dimensions(shapes)
        baseline = compiled_run(architecture, model, options.baseline, expected, varying)
        tested = compiled_run(architecture, model, options.backend, expected, varying)
    limit = architecture.most_compilations
    print(json.dumps({"most_compilations": limit, "baseline": baseline, "tested": tested}))


if __name__ == "__main__":
    main()
