"""The sum of a tensor over the ranks of one host: dlinfer's shared memory against torch.distributed's gloo.

    python -m benchmarks.all_reduce [--ranks 2] [--sizes 1x4096 8x4096 1024x4096] [--dtype bfloat16] [--pairs 500]

Each rank is a process with its share of the CPUs, as LMDeploy's ranks are. The two take turns, so that both meet the
same load. gloo adds in bfloat16, dlinfer in float32. A ratio above 1 says how many times faster dlinfer is, with the
95 % interval of the median. Sizes are rows x columns.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping

import torch
from torch import distributed, multiprocessing

from benchmarks.timing import publish, ratio
from dlinfer.ops.collective import groups
from dlinfer.vendor.cpu import ranks
from dlinfer.vendor.cpu.device import CpuDevice

_CALLS = 8


def measure(rank: int, store: str, chosen: argparse.Namespace) -> None:
    """One rank; the first prints."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=chosen.ranks)
    device = CpuDevice()
    device.share(rank, chosen.ranks)
    group = groups.register(distributed.group.WORLD)  # pyright: ignore[reportArgumentType]
    way = device.connect(group)
    rows = []
    for size in chosen.sizes:
        x = torch.zeros(*map(int, size.split("x")), dtype=getattr(torch, chosen.dtype))
        candidates = {
            "dlinfer": lambda x=x: ranks.all_reduce(x, group),
            "gloo": lambda x=x: distributed.all_reduce(x),
        }
        samples = _taking_turns(
            candidates, chosen.pairs if x.numel() < 1 << 20 else max(chosen.pairs // 20, 3)
        )
        rows.append(
            {
                "size": size,
                "way": way,
                **{f"{name} us": 1e6 * statistics.median(times) for name, times in samples.items()},
                **{f"{name} best us": 1e6 * min(times) for name, times in samples.items()},
                "vs gloo": ratio(samples["gloo"], samples["dlinfer"], resamples=200),
            }
        )
    if rank == 0:
        publish(f"sums over {chosen.ranks} ranks, {chosen.dtype}", rows)
    distributed.barrier()


def _taking_turns(calls: Mapping[str, Callable[[], object]], pairs: int) -> dict[str, list[float]]:
    """Seconds of a call, by ``pairs`` rounds of ``_CALLS`` in a row, as in a decoding step.

    The first call of a round is not timed: ranks come to it at different times, after the other way's last call.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(pairs):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            samples[name].append((time.perf_counter() - start) / _CALLS)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["1x4096", "8x4096", "1024x4096"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pairs", type=int, default=500)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (f"{folder}/store", chosen), nprocs=chosen.ranks)  # pyright: ignore[reportPrivateImportUsage]


if __name__ == "__main__":
    main()
