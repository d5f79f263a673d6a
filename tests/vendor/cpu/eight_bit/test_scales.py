"""Scales in float64, which serve as an oracle: the products are those of float64, not of numbers read as float32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlinfer import ops
from tests.graph.conftest import artifact_folder, graph_mode
from tests.ops import cases

__all__ = ["artifact_folder", "graph_mode"]

LAYERS = [
    "linear_w8a8",
    "linear_w8a8_static",
    "linear_blocked_fp8",
    "linear_static_fp8",
    "fused_moe_blocked_fp8",
    "fused_moe_static_fp8",
]
SCALES = frozenset(
    "rms_scale linear_scale deq_scale weight_scale input_scale gate_up_scales down_scales gate_up_input_scale"
    " down_input_scale".split()
)


def wide(name: str, one: object) -> object:
    return one.double() if name in SCALES and isinstance(one, Tensor) else one


def check(op: str, run: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Every sample of an op, in rows of few and many."""
    spec = ops.registry()[op]
    for sample in cases.samples(spec, dtype):
        args = [wide(name, one) for name, one in zip(spec.parameters, sample.args, strict=True)]
        got = run(*args)
        assert got.dtype == dtype
        within = spec.tolerances[dtype]
        want = cases.expected(spec, args)
        cases.assert_close(cases.results(spec, args, got), want, within)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.short)
@pytest.mark.parametrize("op", LAYERS)
def test_eager_calls(op: str, dtype: torch.dtype) -> None:
    check(op, ops.registry()[op].overload, dtype)


@pytest.mark.parametrize("op", ["linear_w8a8", "linear_blocked_fp8"])
def test_graphs(op: str, graph_mode: object) -> None:
    run = torch.compile(ops.registry()[op].overload, backend="dlinfer", options={"engine": "inductor"})
    check(op, run, torch.float32)


def test_a_result_of_float64_is_as_exact_as_its_scales() -> None:
    """And no sum or scale of it is taken in float32, of which 1 + 2 ** -40 is no number."""
    fine = 1 + 2.0**-40
    one = torch.ones(3, 64)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        numbers, by = one.to(dtype), torch.full((3, 1), fine, dtype=torch.float64)
        got = ops.linear_w8a8(numbers, numbers, by, torch.ones_like(by), torch.float64, dtype, None)
        assert torch.equal(got, torch.full((3, 3), 64 * fine, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_layer_without_inputs_gives_its_bias(dtype: torch.dtype) -> None:
    numbers, ones, bias = torch.ones(2, 0).to(dtype), torch.ones(2, 1), torch.tensor([3.0, 4.0])
    got = ops.linear_w8a8(numbers, numbers, ones, ones, torch.float32, dtype, bias)
    assert torch.equal(got, bias.expand(2, 2))
