"""Accept the vendor on a card: every sample of every op, and real sizes, against the reference in float64.

python -m tests.vendor.camb.accept [camb-acceptance.json]

Prints a line for each op and dtype, and what the installed torch_mlu_ops has otherwise than the golden signatures;
writes every call's outcome, and ends with 1 where a number is wrong or a kernel fails. A refusal is no failure: the
reference has answered, and the reason is written down.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer import ops, settings
from dlinfer.ops.core import fallback
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.vendor import discovery
from dlinfer.vendor.camb import VENDOR, sdk
from dlinfer.vendor.camb.kernels import KERNELS
from tests.ops import cases
from tests.vendor.camb import comparing, real_sizes, signatures

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def all_calls(dtype: torch.dtype) -> Iterator[tuple[str, str, tuple]]:
    """(op, name, arguments on the card) of each call."""

    def maker() -> SampleMaker:
        return SampleMaker(dtype, device=VENDOR.device_type, layout=VENDOR.kv_cache_layout)

    for name in KERNELS:
        for sample in ops.registry()[name].sample_inputs(maker()):
            yield name, sample.name, sample.args
    for call in real_sizes.calls():
        yield call.op, call.name, call.arguments(maker())


def outcome(name: str, args: tuple, dtype: torch.dtype) -> dict[str, Any]:
    """How one call ended: "native", "refused" with a reason, "wrong" or "failed" with what was said."""
    op = ops.registry()[name]
    want = cases.expected(op, comparing.host(op, args))
    fallback.reset()
    try:
        with settings.override(fallback="allow"):
            returned = op.overload(*args)
        found = [one.cpu() for one in comparing.found(op, args, returned)]
    except Exception as error:  # noqa: BLE001 - whatever a driver says is the outcome
        return {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"[:600]}
    worst = max((_error(*pair) for pair in zip(found, want, strict=True)), default=0.0)
    try:
        cases.assert_close(found, want, op.tolerances[dtype])
    except AssertionError as error:
        return {"outcome": "wrong", "worst": worst, "detail": str(error)[:600]}
    reasons = [kind.reason for kind in fallback.counts()]
    return {"outcome": "refused" if reasons else "native", "worst": worst, "detail": "; ".join(reasons)}


def _error(one: Tensor, other: Tensor) -> float:
    """The largest difference between finite numbers."""
    difference = (one.double() - other.double()).abs()
    known = difference[difference.isfinite()]
    return float(known.max()) if known.numel() else 0.0


def main(file: str = "camb-acceptance.json") -> int:
    sdk.load()
    discovery._loaded.setdefault(VENDOR.name, VENDOR)
    discovery.use(VENDOR.name)
    versions = {name: getattr(sys.modules[name], "__version__", "") for name in ("torch", *sdk.PACKAGES)}
    card = {"name": sdk.cards().get_device_name(), **versions}
    drift = signatures.drift(sdk.tmo())
    rows = []
    for dtype in DTYPES:
        for op, name, args in all_calls(dtype):
            rows.append({"op": op, "dtype": cases.short(dtype), "call": name, **outcome(op, args, dtype)})
    Path(file).write_text(json.dumps({"card": card, "drift": drift, "calls": rows}, indent=1))
    print(card)
    print(
        "\n".join(f"OTHER SIGNATURE {one}" for one in drift) or f"signatures as in {signatures.GOLDEN.name}"
    )
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
