"""What a Session's benchmark adds to a loop of the engine's own over the same compiled graph.

    python -m benchmarks.session [--pairs 15] [--runs 300]

Two linear layers through the engine inductor, saved and loaded. Prints a table and, as the last line, JSON: the
microseconds of a run by ``session.run_benchmark``, of a run in a bare loop, of ``session.run``, and the medians of the
differences within a round.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.export import Dim

import dlinfer
from benchmarks.timing import publish
from dlinfer.runtime.session.session import Session


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--runs", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)  # what Python adds is looked for, not how threads wait for each other
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.SiLU(), torch.nn.Linear(256, 64)).eval()
    artifact = dlinfer.compile(model, (torch.randn(4, 64),), dynamic_shapes=({0: Dim("rows", max=64)},))
    with tempfile.TemporaryDirectory() as folder:
        artifact.save(Path(folder) / "model.dlinfer")
        with dlinfer.load(Path(folder) / "model.dlinfer") as session:
            compare(session, args.pairs, args.runs)


def compare(session: Session, pairs: int, runs: int) -> None:
    inputs = {"input": torch.randn(4, 64)}
    session.setup()
    stage = session._running["forward"][0]
    arguments, _ = stage.interface.bind([inputs["input"]])
    call = stage.run
    arguments = (*stage.weights, *arguments)

    def benchmark() -> float:
        return session.run_benchmark(num_inferences=runs, input_dict=inputs).inf_time

    def engine() -> float:
        with torch.no_grad():
            start = time.perf_counter()
            for _ in range(runs):
                call(*arguments)
            return time.perf_counter() - start

    def run() -> float:
        start = time.perf_counter()
        for _ in range(runs):
            session.run(inputs)
        return time.perf_counter() - start

    kinds = {"run_benchmark": benchmark, "engine": engine, "run": run}
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    draw = random.Random(0)
    for turn in range(-2, pairs):
        for name in draw.sample(list(kinds), len(kinds)):
            seconds = kinds[name]()
            if turn >= 0:
                samples[name].append(seconds / runs * 1e6)
    rows = [
        {
            "call": name,
            "µs a run": statistics.median(samples[name]),
            "µs over the engine's loop": statistics.median(
                mine - bare for mine, bare in zip(samples[name], samples["engine"], strict=True)
            ),
        }
        for name in kinds
    ]
    publish("a session's runs of two linear layers, 4 rows", rows)


if __name__ == "__main__":
    main()
