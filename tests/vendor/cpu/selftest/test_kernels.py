"""Every C++ kernel has self-test cases, and its callers look them up under the right name and dtype."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlinfer import ops, settings, vendor
from dlinfer.graph.selftest import suite
from dlinfer.graph.selftest.case import Case
from dlinfer.graph.selftest.suite import SelfTest
from dlinfer.ops.attention.kv_cache import kv_order
from dlinfer.vendor import discovery
from dlinfer.vendor.cpu import compiled, native
from dlinfer.vendor.cpu.bf12.matrices import pack, unpack
from dlinfer.vendor.cpu.inductor.engine import InductorEngine
from dlinfer.vendor.cpu.sampling import CpuSampler
from dlinfer.vendor.cpu.selftest import kernels as kernel_selftest
from dlinfer.vendor.cpu.selftest.kernels import KERNEL_SELFTEST
from tests.graph.conftest import artifact_folder, graph_mode
from tests.ops import cases
from tests.vendor.cpu.test_native import needs_compiler

__all__ = ["artifact_folder", "graph_mode"]

pytestmark = [needs_compiler, pytest.mark.usefixtures("cpu")]

# Sums of whole numbers, whose bits no rounding can change, are not asked; the others compute nothing.
WITHOUT = {"add_whole", "add_whole_", "empty_strided", "linear_max_inputs", "linear_takes", "free_chain", "make_chain",
           "results_escape", "run_chain", "open_group", "close_group", "shared_bytes", "set_batch_invariant",
           "unpack_gguf",  # linear_gguf runs the same code
           }  # fmt: skip


@pytest.fixture
def cpu() -> None:
    assert native.why_not() is None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """What is asked for from here on: names of kernels and of dtypes. None of it is computed."""
    found: set[tuple[str, str]] = set()

    def failure(self: SelfTest, op: str, precision: str) -> None:
        found.add((op, precision))

    monkeypatch.setattr(SelfTest, "failure", failure)
    monkeypatch.setattr(compiled, "_reasons", {})
    yield found


def answered() -> set[tuple[str, str]]:
    """The names and dtypes that answers are filed under."""
    return {(op, case.precision) for case in KERNEL_SELFTEST.cases() for op in case.covers}


def test_every_kernel_has_answers() -> None:
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    kernels = {name.removeprefix("dlinfer_cpu::") for name in names if name.startswith("dlinfer_cpu::")}
    assert {kind.removeprefix("native ") for kind, _ in answered()} == kernels - WITHOUT


class _Called(TorchDispatchMode):
    """Records the kernels that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removeprefix("dlinfer_cpu::"))
        return func(*args, **(kwargs or {}))


def test_a_case_calls_the_kernels_that_it_covers() -> None:
    """Results are stored by name and dtype, so no two cases may share these."""
    every = list(kernel_selftest.cases())
    assert len({(case.name, case.precision) for case in every}) == len(every)
    for case in every:
        called = _Called()

        def run(case: Case = case, called: _Called = called) -> None:
            with called:
                case.run()

        suite._isolated(run)
        assert {kind.removeprefix("native ") for kind in case.covers} <= called.names


def test_cases_hold_while_a_vendor_of_another_cache_layout_is_active() -> None:
    active = discovery.activate_default("cpu")
    assert active is not None
    vendor.use("openvino")
    try:
        assert kv_order("cpu") != "BSHD"
        for case in kernel_selftest.cases():
            if case.precision == "float32" and ("cache" in case.name or "attention" in case.name):
                assert suite._run(case).state == "passed", case.name
    finally:
        vendor.use(active.name)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.short)
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_eager_calls_ask_with_the_keys_of_answers(
    asked: set[tuple[str, str]], dtype: torch.dtype, activations: str
) -> None:
    with settings.override(cpu_activations=activations):
        for spec in ops.registry().values():
            for one in cases.samples(spec, dtype):
                spec.overload(*one.args)
    sampler, logits = CpuSampler(), torch.zeros(2, 9, dtype=dtype)
    sampler.largest(logits)
    sampler.draw(logits, torch.zeros(2))
    unpack(pack(torch.ones(4, 128, dtype=torch.bfloat16)), 4, 128)
    assert asked - answered() == set()
    some = {"linear", "linear_fp8", "widen_fp8", "rounded_in_blocks", "dynamic_quant", "rms_norm_w8a8", "linear_w8a8",
            "embedding_bf12", "pack_bf12", "unpack_bf12", "mxfp4_matmul", "largest_tokens"}  # fmt: skip
    assert some <= {kind.removeprefix("native ") for kind, _ in asked}


@pytest.mark.parametrize(("of_x", "of_scales"), [("float32", "float16"), ("bfloat16", "float16")])
def test_a_graph_asks_for_the_dtype_that_is_computed_in(
    asked: set[tuple[str, str]], graph_mode: object, of_x: str, of_scales: str
) -> None:
    """Not for that of scales which stand beside."""
    words, scales = torch.zeros(16, 2, dtype=torch.int32), torch.ones(1, 16, dtype=getattr(torch, of_scales))
    x = torch.randn(3, 16).to(getattr(torch, of_x))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return ops.weight_quant_matmul(x, words, scales)

    torch.compile(layer, backend="dlinfer", options={"engine": "inductor", "fallback": "error"})(x)
    assert {precision for kind, precision in asked if kind == "native weight_quant_matmul"} == {of_x}
    selftest: Any = InductorEngine().selftest
    covering = [case for case in selftest.cases() if case.precision == of_x]
    assert any("native weight_quant_matmul" in case.covers for case in covering)
