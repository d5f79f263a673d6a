"""Accept the vendor on a card: every sample of every op, and real sizes, against the references in float64.

python -m tests.vendor.maca.accept [maca-acceptance.json]

Prints a line for each op and dtype, writes every call's outcome, and ends with 1 where a number is wrong or a kernel
fails. A refusal is no failure: the reference has answered, and the reason is written down.
"""

import importlib.metadata
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer import ops, settings
from dlinfer.ops.core import fallback
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.vendor import discovery, maca
from dlinfer.vendor.maca import sdk
from dlinfer.vendor.maca.kernels import KERNELS
from tests.ops import cases
from tests.vendor.maca import real_sizes, tolerances

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PACKAGES = ("torch", "mcoplib", "flash_attn", "flash_mla", "triton", "vllm", "vllm_metax")


def all_calls(dtype: torch.dtype) -> Iterator[tuple[str, str, tuple]]:
    """(op, name, arguments on the card) of each call."""

    def maker() -> SampleMaker:
        return SampleMaker(dtype, device=maca.VENDOR.device_type, layout=maca.VENDOR.kv_cache_layout)

    for name in KERNELS:
        for sample in ops.registry()[name].sample_inputs(maker()):
            yield name, sample.name, sample.args
    for call in real_sizes.calls():
        if call.op in KERNELS:
            yield call.op, call.name, call.arguments(maker())


def outcome(name: str, args: tuple, dtype: torch.dtype) -> dict[str, Any]:
    """How one call ended: "native", "refused" with a reason, "wrong" or "failed" with what was said."""
    op = ops.registry()[name]
    want = cases.expected(op, pytree.tree_map_only(Tensor, Tensor.cpu, args))
    fallback.reset()
    try:
        with settings.override(fallback="allow"):
            returned = op.overload(*args)
        found = [one.cpu() for one in cases.results(op, args, returned)]
    except Exception as error:  # noqa: BLE001 - whatever a driver says is the outcome
        return {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"[:600]}
    try:
        cases.assert_close(found, want, tolerances.of(op, dtype))
    except AssertionError as error:
        return {"outcome": "wrong", "detail": str(error)[:600]}
    reasons = [kind.reason for kind in fallback.counts()]
    return {"outcome": "refused" if reasons else "native", "detail": "; ".join(reasons)}


def versions() -> dict[str, str]:
    """Of MetaX's packages, which say in them what MACA they are for."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def main(file: str = "maca-acceptance.json") -> int:
    discovery._loaded.setdefault(maca.VENDOR.name, maca.VENDOR)
    discovery.use(maca.VENDOR.name)
    card = {"name": sdk.cards().get_device_name(), "device_type": maca.VENDOR.device_type, **versions()}
    rows = [
        {"op": op, "dtype": cases.short(dtype), "call": name, **outcome(op, args, dtype)}
        for dtype in DTYPES
        for op, name, args in all_calls(dtype)
    ]
    Path(file).write_text(json.dumps({"card": card, "calls": rows}, indent=1))
    print(card)
    table: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        table.setdefault((row["op"], row["dtype"]), Counter())[row["outcome"]] += 1
    for (op, dtype), counts in table.items():
        print(f"{op:34}{dtype:10}" + ", ".join(f"{count} {what}" for what, count in counts.items()))
    bad = [row for row in rows if row["outcome"] in ("wrong", "failed")]
    for row in bad:
        print(f"{row['outcome'].upper()} {row['op']} {row['dtype']} ({row['call']}): {row['detail']}")
    print(f"{'FAIL' if bad else 'PASS'}: {len(rows)} calls, {len(bad)} of them wrong or failed; see {file}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
