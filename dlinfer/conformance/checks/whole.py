"""Checks of whole blocks against the reference in float64: eager on the vendor's kernels, and compiled by its engine.

A block may contain ops that the vendor does not serve. The fallback policy ``allow`` runs these ops on the reference.
The block's result must still be right. The check's note lists these ops.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer import settings
from dlinfer.conformance.blocks import CACHES, Blocks, steps, weights
from dlinfer.conformance.case import Failed, Subject
from dlinfer.conformance.checks import graphs
from dlinfer.ops.core import fallback
from dlinfer.utils.closeness import difference
from dlinfer.vendor import discovery
from dlinfer.vendor.base import HOST, KVCacheLayout

_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}
"""dtype -> absolute and relative tolerance, for results near 1 that about ten ops computed, each with a rounding."""

REFERENCE = "reference"


@dataclass(frozen=True)
class Whole:
    subject: Subject
    op: Blocks
    dtype: torch.dtype
    sample: str = "prefill, decode"


class _Model(nn.Module):
    """A block as a module that owns its weights. Compilers treat the sizes of a module's weights as static."""

    def __init__(self, block: Blocks, held: dict[str, Tensor]) -> None:
        super().__init__()
        self.block = block.run
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(weight, requires_grad=False) for name, weight in held.items()}
        )

    def forward(self, inputs: Tensor, step: dict[str, Any]) -> Tensor:
        return self.block(inputs, dict(self.weights.items()), step)


def eager(case: Whole) -> str:
    """Check the block on the vendor's kernels.

    Return a text that names the ops without a kernel; empty if there are none.
    """
    return _compared(case, lambda model: model)


def graph(case: Whole) -> str:
    """Check the block compiled by the vendor's engine, with static sizes for each step."""
    return _compiled(case, dynamic=False)


def dynamic(case: Whole) -> str:
    """Check the block compiled by the vendor's engine with symbolic sizes."""
    return _compiled(case, dynamic=True)


def _compiled(case: Whole, dynamic: bool) -> str:
    torch.compiler.reset()
    options: Any = {"engine": graphs.engine_of(case.subject), "fallback": "allow"}
    try:
        return _compared(
            case,
            lambda model: torch.compile(
                model, backend="dlinfer", fullgraph=True, dynamic=dynamic, options=options
            ),
        )
    finally:
        torch.compiler.reset()


def _compared(case: Whole, prepared: Callable[[nn.Module], Callable[..., Tensor]]) -> str:
    want = _oracle(case)
    before = fallback.counts()
    make = case.subject.maker(case.dtype)
    run = prepared(_Model(case.op, weights(make)))
    with settings.override(fallback="allow"):
        for number, (inputs, step) in enumerate(steps(make, case.op.takes_tokens)):
            actual, bound = run(inputs, step), _TOLERANCES[case.dtype]
            case.subject.check_device([actual])
            wrong = difference([actual.cpu()], [want[number]], rtol=bound, atol=bound, expected_is_wide=True)
            if wrong is not None:
                raise Failed(f"{f'step {number} of decoding' if number else 'prefill'}: {wrong}")
    new = {kind for kind, count in fallback.counts().items() if count > before.get(kind, 0)}
    return "; ".join(sorted({f"not run by the vendor: {kind.op}: {kind.reason}" for kind in new}))


def _oracle(case: Whole) -> list[Tensor]:
    make = case.subject.maker(case.dtype, on_host=True)
    make.layout = KVCacheLayout(block_size=case.subject.vendor.kv_cache_layout.block_size)
    model = _Model(case.op, _wide(weights(make)))
    results: list[Tensor] = []
    with _reference():
        caches: dict[str, Tensor] = {}
        for inputs, step in steps(make, case.op.takes_tokens):
            caches = caches or _wide({name: step[name] for name in CACHES})
            wide = inputs.double() if inputs.is_floating_point() else inputs
            results.append(model(wide, {**_wide(step), **caches}))
    return results


def _wide(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in values.items()
    }


@contextmanager
def _reference() -> Iterator[None]:
    active = discovery.activate_default(HOST)
    discovery.use(REFERENCE, HOST)
    try:
        yield
    finally:
        if active is not None:
            discovery.use(active.name, HOST)
