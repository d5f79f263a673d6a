"""Which nodes become loops, and which stay calls of a kernel."""

import pytest
import torch
import torch.nn.functional as F

from dlinfer.graph.ir.dialect import is_pure, op_name, tensors_of
from dlinfer.graph.torch_private.fake_mode import mode_of
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor import fusible
from dlinfer.vendor.cpu.inductor.fusible import decompositions, loops_of
from tests.graph.passes.fusion.capturing import captured

x, w = torch.randn(3, 8), torch.randn(8, 8)
tokens = torch.tensor([1, 2])
numbers = torch.arange(6).view(2, 3)


def loops(function, *args) -> dict[str, int]:
    graph = captured(function, *args).graph_module.graph
    return {op_name(n): loops_of(n) for n in graph.nodes if n.op == "call_function" and is_pure(n)}


@pytest.mark.parametrize(
    ("function", "args", "op", "fuses"),
    [
        (lambda x: x * 2, [x], "aten.mul.Tensor", True),
        (F.silu, [x], "aten.silu", True),
        (lambda x: x.softmax(-1), [x], "aten.softmax.int", True),
        (lambda x: x.mean(-1), [x], "aten.mean.dim", True),
        (lambda x: F.layer_norm(x, (8,)), [x], "aten.layer_norm", True),
        (lambda x: torch.cat([x, x]), [x], "aten.cat", True),
        (lambda x: x.to(torch.bfloat16), [x], "aten.to.dtype", True),
        # where loops lose digits or take infinities otherwise
        (torch.expm1, [x], "aten.expm1", False),
        (F.elu, [x], "aten.elu", False),
        (lambda x: x // 2, [x], "aten.floor_divide", False),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), [x], "aten.div.Tensor_mode", False),
        (lambda x: x % 2, [x], "aten.remainder.Scalar", False),
        (lambda x: x % 2, [numbers], "aten.remainder.Scalar", True),
        (F.gelu, [x], "aten.gelu", True),
        # where elements would be counted in the order of memory
        (torch.argmax, [x], "aten.argmax", False),
        (torch.argmin, [x], "aten.argmin", False),
        (lambda x: x.argmax(-1), [x], "aten.argmax", True),
        # where the order of a sum would show
        (lambda x: torch.ops.dlinfer.rms_norm(x, x[0], 1e-6), [x], "dlinfer.rms_norm", False),
        (lambda x: torch.ops.dlinfer.rms_norm(x, x[0], 1e-6), [x.double()], "dlinfer.rms_norm", True),
        (lambda x: torch.ops.dlinfer.rms_norm(x, x[0], 1e-6), [x.bfloat16()], "dlinfer.rms_norm", False),
        (
            lambda x: torch.ops.dlinfer.add_rms_norm(x, x, x[0], 1e-6)[0],
            [x.half()],
            "dlinfer.add_rms_norm",
            False,
        ),
        (lambda x: torch.ops.dlinfer.dynamic_quant(x, torch.int8)[0], [x], "dlinfer.dynamic_quant", False),
        (
            lambda x: torch.ops.dlinfer.rms_norm_w8a8(x, x[0], 1e-6, torch.int8)[0],
            [x],
            "dlinfer.rms_norm_w8a8",
            False,
        ),
        # libraries
        (F.linear, [x, w], "aten.linear", False),
        (torch.matmul, [x, w], "aten.matmul", False),
        (lambda x: x.sort().values, [x], "aten.sort", False),
        (lambda x: x.topk(2).values, [x], "aten.topk", False),
        (lambda x: x.cumsum(0), [x], "aten.cumsum", False),
        (lambda x: torch.fft.rfft(x).abs(), [x], "aten.fft_rfft", False),
        # dtypes
        (lambda x: torch.complex(x, x).abs(), [x], "aten.complex", False),
        # a wrong index or divisor would end the process
        (F.embedding, [tokens, w], "aten.embedding", False),
        (lambda x, t: x[t], [x, tokens], "aten.index.Tensor", False),
        (lambda x, t: x.index_select(0, t), [x, tokens], "aten.index_select", False),
        (lambda x, t: x.gather(0, t[:, None]), [x, tokens], "aten.gather", False),
        (
            lambda a, b: torch.div(a, b, rounding_mode="trunc"),
            [numbers, numbers + 1],
            "aten.div.Tensor_mode",
            False,
        ),
        (lambda a, b: torch.div(a, b, rounding_mode="trunc"), [x, x + 1], "aten.div.Tensor_mode", True),
        (lambda a, b: a // b, [numbers, numbers + 1], "aten.floor_divide", False),
        (lambda a: a // 3, [numbers], "aten.floor_divide", True),
    ],
)
def test_loops(function, args, op, fuses):
    assert bool(loops(function, *args)[op]) is fuses


@pytest.mark.parametrize(("dtype", "fuses"), [(torch.float32, True), (torch.bfloat16, False)])
def test_norms_without_a_compiler(monkeypatch, dtype, fuses):
    """In 16 bits the order of the sum would show, so torch's kernels compute them one by one."""
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    norm = torch.ops.dlinfer.rms_norm
    assert bool(loops(lambda x: norm(x, x[0], 1e-6), x.to(dtype))["dlinfer.rms_norm"]) is fuses


def test_work_counts_its_elementary_loops():
    found = loops(lambda x: (x * 2, F.layer_norm(x, (8,))), x)
    assert found["aten.mul.Tensor"] == 1
    assert found["aten.layer_norm"] > 1


def test_results_whose_size_depends_on_data_are_kernels():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert loops(lambda x: x.nonzero(), x)["aten.nonzero"] == 0


def test_ops_that_write_are_not_decomposed():
    from dlinfer.ops.core.spec import registry

    table = decompositions()
    assert all((spec.overload in table) is not bool(spec.mutates) for spec in registry().values())


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("function", [lambda x: F.max_pool2d(x, 2), lambda x: F.pixel_shuffle(x, 2)])
def test_asking_leaves_no_guard_on_the_models_sizes(monkeypatch, function):
    """The answers are kept: a guard would be there only for the model that asked first."""
    monkeypatch.setattr(fusible, "_answers", {})
    graph = captured(function, torch.randn(2, 8, 6, 10), dynamic=True).graph_module.graph
    environment = mode_of(tensors_of(node)[0] for node in graph.nodes if tensors_of(node)).shape_env
    assert environment is not None
    before, ranges = list(environment.guards), dict(environment.var_to_range)
    assert sum(loops_of(node) for node in graph.nodes if node.op == "call_function" and is_pure(node))
    assert environment.guards == before
    assert environment.var_to_range == ranges
