"""Graphs as ONNX: names, sizes, constants, promotion; models are run by ONNX's own reference evaluator."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

pytest.importorskip("onnx", reason="writing ONNX needs onnx")
pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

from torch import fx

from dlinfer.errors import NotExportableError
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.onnx.export import OnnxGraph, export
from dlinfer.graph.onnx.translations.writing import Untranslated, op
from dlinfer.graph.torch_private import fake_mode

X = torch.randn


def graph_of(function: Callable[..., Any], *values: torch.Tensor) -> fx.GraphModule:
    mode = fake_mode.fresh_mode()
    fakes = [mode.from_tensor(value) for value in values]
    return trace(lambda *given: pytree.tree_leaves(function(*given)), fakes, mode).graph_module


def run(graph: OnnxGraph, *values: torch.Tensor) -> list[torch.Tensor]:
    import onnx
    from onnx.reference import ReferenceEvaluator

    model = onnx.load_from_string(graph.to_bytes())
    onnx.checker.check_model(model)
    feeds = {name: value.numpy() for name, value in zip(graph.inputs, values, strict=True)}
    return [torch.as_tensor(value) for value in ReferenceEvaluator(model).run(list(graph.outputs), feeds)]


def same(
    function: Callable[..., Any], *values: torch.Tensor, others: tuple[torch.Tensor, ...] = ()
) -> OnnxGraph:
    graph = export(graph_of(function, *values))
    for given in (values, others or values):
        torch.testing.assert_close(
            run(graph, *given), pytree.tree_leaves(function(*given)), rtol=1e-4, atol=1e-5
        )
    return graph


def test_sizes_are_named_and_one_model_serves_all():
    graph = same(lambda x, y: (x @ y.t()).softmax(-1), X(3, 4), X(5, 4), others=(X(6, 4), X(2, 4)))
    first: Any
    second: Any
    first, second = (value.shape for value in graph.model.graph.inputs)
    assert first[1] == second[1]
    assert first[0] != second[0]


def test_standard_translations_of_our_ops_use_onnxs_own_ops_only():
    ops = torch.ops.dlinfer

    def function(x, w, q, k, cos, sin):
        normed, total = ops.add_rms_norm(x, x, w, 1e-6)
        return (
            ops.silu_mul(normed, total),
            *ops.apply_rotary_pos_emb(q, k, cos, sin),
            ops.gelu_mul(x, x, True),
        )

    cos = X(5, 8)
    graph = same(function, X(5, 16), X(16), X(5, 2, 8), X(5, 1, 8), cos, cos.flip(0))
    assert {node.domain for node in graph.model.graph} == {""}


def test_results_and_inputs_are_apart():
    def function(x):
        total = x + 1
        return x, total, total, x.view(x.shape)

    graph = same(function, X(3, 4))
    assert graph.outputs == ("result_0", "result_1", "result_2", "result_3")


def test_constants_are_initialisers():
    table = torch.arange(6.0)
    graph = same(lambda x: x * torch.tensor([1.0, 2, 3, 4, 5, 6]) + table, X(3, 6))
    assert len(graph.inputs) == 1
    assert len(graph.model.graph.initializers) >= 1


def test_an_input_that_is_given_back_by_a_translation_keeps_its_name():
    graph = same(lambda x, y: (x.to(torch.float32) + y, y.contiguous() * 2), X(3, 4), X(3, 4))
    assert list(graph.inputs) == [value.name for value in graph.model.graph.inputs]


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a + b,
        lambda a, b: a > 0.5,
        lambda a, b: a == b,
        lambda a, b: torch.where(a > 2, a, b),
        lambda a, b: a / 2,
        lambda a, b: a.masked_fill(b > 0, 7),
        torch.maximum,
        lambda a, b: a * 2.5,
        lambda a, b: a & (a > 0),
    ],
)
def test_dtypes_are_promoted_as_torch_does(function):
    same(function, torch.randint(-5, 5, (4, 3)), X(4, 3))


def test_what_has_no_translation_is_decomposed_alone():
    graph = same(lambda x: F.hardsigmoid(torch.diff(x)) + x.softmax(-1)[:, 1:], X(4, 5))
    kinds = Counter(node.op_type for node in graph.model.graph)
    assert (kinds["HardSigmoid"], kinds["Softmax"]) == (1, 1)
    assert kinds["Slice"] > 1  # diff is a difference of slices
    assert "Exp" not in kinds


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batched"])
def test_a_convolution_of_three_dimensions_without_a_bias(batch):
    """torch.onnx adds a bias of [out, 2] elements, which runtimes refuse as they run."""

    def function(x, w, scale):
        return F.conv3d(x, w, padding=1, stride=(1, 2, 1)) + scale, F.conv3d(x, w, w[:, 0, 0, 0, 0])

    same(function, X(*batch, 2, 5, 6, 7), X(3, 2, 3, 3, 3), torch.tensor(2.0))


def test_zeros_keep_their_sign_where_what_is_behind_the_point_is_cut_off():
    x = torch.tensor([-0.0, 0.0, -0.5, 0.5, -1.5, 1.5, torch.nan])
    graph = export(graph_of(lambda x: (x.trunc(), x.frac(), torch.div(x, 2, rounding_mode="trunc")), x))
    for given, wanted in zip(
        run(graph, x), (x.trunc(), x.frac(), torch.div(x, 2, rounding_mode="trunc")), strict=True
    ):
        torch.testing.assert_close(given, wanted, equal_nan=True)
        numbers = ~wanted.isnan()
        assert torch.equal(given.signbit()[numbers], wanted.signbit()[numbers])


def test_a_float_of_sizes_is_left_to_python():
    def function(x):
        return torch.sym_float(x.shape[0]) / 3 * x

    with pytest.raises(NotExportableError, match="64 bits"):
        export(graph_of(function, X(4, 5)))


def test_what_has_neither_is_named():
    with pytest.raises(NotExportableError) as caught:
        export(graph_of(torch.linalg.eigvals, X(3, 3)))
    assert "eig" in caught.value.fields["node"]
    assert "translation to ONNX" in str(caught.value)


def test_a_translation_may_refuse_a_call():
    def no(self, other, *, alpha=1):
        raise Untranslated("not today")

    with pytest.raises(NotExportableError) as caught:
        export(graph_of(torch.add, X(3), X(3)), translations=lambda: {torch.ops.aten.add.Tensor: no})
    assert (caught.value.fields["node"], caught.value.fields["op"]) == ("add", "aten.add.Tensor")
    assert "not today" in str(caught.value.fields["reason"])


def test_translations_given_go_before_the_standard_ones():
    def twice(x, weight, eps):
        return op.Add(x, x)

    graph = export(
        graph_of(lambda x, w: torch.ops.dlinfer.rms_norm(x, w, 1e-6), X(3, 4), X(4)),
        translations=lambda: {torch.ops.dlinfer.rms_norm.default: twice},
    )
    assert [node.op_type for node in graph.model.graph] == ["Add"]


def test_the_model_is_shown_as_text():
    text = str(export(graph_of(lambda x: x.relu(), X(3, 4))))
    assert "Relu" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # torch rounds float16 in two ways
@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_quotients_of_floats_are_rounded_as_torch_rounds_them(mode, dtype):
    """5 / 0.001 rounds to 5000, and is less."""
    x = torch.tensor([5.0, -5.0, 0.3, -0.3, -0.0, 7.0, 1.0, -1.0], dtype=dtype)
    y = torch.tensor([0.001, 0.001, 0.1, 0.1, 3.0, torch.inf, -torch.inf, 0.0], dtype=dtype)
    same(lambda x, y: torch.div(x, y, rounding_mode=mode), x, y)
    same(lambda x, y: torch.div(x, y, rounding_mode="floor").reciprocal(), x, y)  # the sign of a zero


def test_floor_divide_is_rounded_as_torch_rounds_it():
    same(lambda x, y: (x // y, x // 0.7, x // 2), X(5, 3), X(3))
    same(lambda x, y: (x // y, x // 3), torch.randint(-9, 9, (5, 3)), torch.tensor([2, -3, 7]))
