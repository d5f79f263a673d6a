"""The next tokens of a batch: dlinfer's sampler against LMDeploy's own way, as its engine calls both.

    python -m benchmarks.sampling [--batch 1 8] [--dtype bfloat16] [--vocabulary 151936] [--scale 3 1] [--pairs 15]

LMDeploy's way is torch's argmax, or its topk or sort and a walk along the sums of the softmax. ``scale`` is the
standard deviation of the logits, which are normal: of 3, hundreds of tokens have most of the probability; of 1, tens of
thousands. A ratio above 1 says how many times faster dlinfer is, with the 95 % interval of the median.
"""

import argparse
import statistics
from typing import Any

import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.devices import DeviceContext, get_device_manager
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs

from benchmarks.timing import interleave, publish, ratio
from dlinfer.vendor.cpu import native

KINDS = ("greedy", "top_k 50", "top_p 0.9", "all")


def inputs(kind: str, batch: int) -> SamplingInputs:
    """What LMDeploy makes of requests of one kind; of all of the vocabulary, ``all``."""
    given: dict[str, Any] = {"top_p": torch.full((batch,), 0.9)} if kind == "top_p 0.9" else {}
    return SamplingInputs(
        max_top_k={"greedy": 1, "top_k 50": 50}.get(kind, 0),
        **given,
        random_seeds=torch.arange(batch),
        random_offsets=torch.full((batch,), 7),
        batch_size=batch,
    )


def measure(kind: str, batch: int, scale: float, chosen: argparse.Namespace) -> dict[str, object]:
    """The row of the table for one kind of requests."""
    logits = (torch.randn(batch, chosen.vocabulary) * scale).to(getattr(torch, chosen.dtype))
    processor = FusedLogitsProcessor(inputs(kind, batch))
    own = FusedLogitsProcessor.sampling.__wrapped__  # pyright: ignore[reportFunctionMemberAccess] - the patch's
    candidates = {
        "dlinfer": lambda: processor.sampling(logits),
        "lmdeploy": lambda: own(processor, logits),
    }
    samples = interleave(candidates, chosen.pairs)
    return {
        "kind": kind,
        "batch": batch,
        "scale": scale,
        **{f"{name} us": 1e6 * statistics.median(of_one) for name, of_one in samples.items()},
        "vs lmdeploy": ratio(samples["lmdeploy"], samples["dlinfer"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--scale", nargs="+", type=float, default=[3.0, 1.0])
    parser.add_argument("--pairs", type=int, default=15, help="rounds that are timed")
    chosen = parser.parse_args()

    reason = native.why_not()
    if reason:
        parser.exit(1, f"dlinfer's kernels are not available: {reason}\n")
    PytorchEngineConfig(device_type="cpu")
    torch.manual_seed(0)
    with get_device_manager().context(DeviceContext("cpu")):
        rows = [
            measure(kind, batch, scale, chosen)
            for batch in chosen.batch
            for kind in KINDS
            for scale in chosen.scale
        ]
    publish(f"next tokens {chosen.dtype}, vocabulary of {chosen.vocabulary}", rows)


if __name__ == "__main__":
    main()
