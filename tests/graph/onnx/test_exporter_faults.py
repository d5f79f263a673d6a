"""Parameters of ATen's ops that the exporter's translations ignore: all of them, in the installed onnxscript."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

from torch import fx

from dlinfer.graph.onnx.export import OPSET
from dlinfer.graph.onnx.exporter_faults import HARMLESS, HARMLESS_OF
from dlinfer.graph.onnx.support import Refusals
from dlinfer.graph.torch_private.onnx import Registry, _python_function, _torch_table

aten = torch.ops.aten

REFUSED = {
    "aten::allclose": {"equal_nan"},
    "aten::multinomial": {"replacement"},
    "aten::sort": {"stable"},
    "aten::sym_storage_offset": {"self", "dim"},
    "aten::unique_consecutive": {"return_inverse", "return_counts"},
    "aten::_unique": {"sorted"},
    "aten::_unique2": {"sorted"},
    "aten::unique_dim": {"sorted"},
    "aten::avg_pool2d": {"divisor_override"},
    "aten::avg_pool3d": {"divisor_override"},
    "aten::cross_entropy_loss": {"label_smoothing"},
    "aten::embedding_bag": {"padding_idx"},
    "aten::_scaled_dot_product_flash_attention": {"return_debug_mask"},
    "aten::upsample_bicubic2d": {"scales_h", "scales_w"},
    "aten::_upsample_bicubic2d_aa": {"scales_h", "scales_w"},
    "aten::upsample_bilinear2d": {"scales_h", "scales_w"},
    "aten::_upsample_bilinear2d_aa": {"scales_h", "scales_w"},
    "aten::upsample_linear1d": {"scales"},
    "aten::upsample_trilinear3d": {"scales_d", "scales_h", "scales_w"},
}
"""What is ignored, reviewed, and refused where a call passes it."""

OTHER_DEFAULTS = {
    ("aten::cross", "dim"),  # refused as a fault
    ("aten::baddbmm", "beta"),  # taken for 1
    ("aten::baddbmm", "alpha"),  # taken for 1
    ("aten::slice.Tensor", "step"),  # taken for 1
    ("aten::_embedding_bag", "padding_idx"),  # refused as a fault
    ("aten::_embedding_bag_forward_only", "padding_idx"),  # refused as a fault
    ("aten::all.dims", "dim"),  # both are all dimensions
    ("aten::any.dims", "dim"),  # both are all dimensions
    ("aten::_grouped_mm", "out_dtype"),  # both are the operands'
}
"""Parameters for which a translation has another default than the op, reviewed."""


def translations() -> list[tuple[str, Callable[..., Any]]]:
    """(name of an op, the function that writes it), of ATen's ops."""
    table = _torch_table(OPSET).functions
    return [
        (name, _python_function(entry.onnx_function))
        for name, entries in table.items()
        if isinstance(name, str) and name.startswith("aten::")
        for entry in entries
        if not entry.is_complex
    ]


def never_read(function: Callable[..., Any]) -> set[str]:
    """The parameters that a function's source reads nowhere, or only to delete or pass to one that reads them not."""
    definition: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    parameters = set(inspect.signature(function).parameters)
    parents = {
        child: node
        for statement in definition.body
        for node in ast.walk(statement)
        for child in ast.iter_child_nodes(node)
    }
    read = {
        node.id
        for node in parents
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node.id in parameters
        and not passed_to_one_that_ignores(node, parents, function)
    }
    return parameters - read


def passed_to_one_that_ignores(name: ast.Name, parents: dict[Any, Any], function: Any) -> bool:
    parent = parents[name]
    keyword = parent.arg if isinstance(parent, ast.keyword) else None
    call = parents.get(parent) if keyword else parent
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func is name:
        return False
    callee = function.__globals__.get(call.func.id)
    if callee is None or not getattr(callee, "__module__", "").startswith("onnxscript.function_libs"):
        return False
    if inspect.isclass(callee) or not callable(callee):
        return False
    callee = _python_function(callee)
    names = list(inspect.signature(callee).parameters)
    place = None if keyword else call.args.index(name)
    parameter = keyword if place is None else names[place] if place < len(names) else None
    return callee is not function and parameter in never_read(callee)


def overload(name: str) -> torch._ops.OpOverload | None:
    packet, _, kind = name.removeprefix("aten::").partition(".")
    found = getattr(aten, packet, None)
    return getattr(found, kind or "default", None)


def test_each_is_reviewed():
    found: dict[str, set[str]] = {}
    for name, function in translations():
        op = overload(name)
        schema = op._schema.name if op is not None else name
        ignored = never_read(function) - HARMLESS - HARMLESS_OF.get(schema, frozenset())
        if ignored:
            found.setdefault(name, set()).update(ignored)
    assert found == REFUSED


def test_what_the_source_says_the_registry_says():
    registry = Registry(OPSET, {})
    for name, function in translations():
        op = overload(name)
        if op is not None:
            assert registry.unread(op) >= never_read(function), name


def test_defaults_that_are_not_the_ops_are_reviewed():
    found = set()
    for name, function in translations():
        op = overload(name)
        if op is None:
            continue
        parameters = inspect.signature(function).parameters
        for argument in op._schema.arguments:
            other = parameters.get(argument.name)
            if other is None or not argument.has_default_value() or argument.name in HARMLESS | {"dtype"}:
                continue
            default = other.default
            default = list(default) if isinstance(default, tuple) else default
            # Without a default the call fails, and is refused.
            if default is not inspect.Parameter.empty and default != argument.default_value:
                found.add((name, argument.name))
    assert found == OTHER_DEFAULTS


def refusal_of(op: Any, *args: Any, **kwargs: Any) -> str | None:
    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        value = op(*fakes, **kwargs)
    nodes = []
    for index, fake in enumerate(fakes):
        nodes.append(fake)
        if isinstance(fake, torch.Tensor):
            nodes[-1] = graph.placeholder(f"x{index}")
            nodes[-1].meta["val"] = fake
    node = graph.call_function(op, tuple(nodes), kwargs)
    node.meta["val"] = value
    return Refusals(fault=lambda model: None).of(node)


X, TARGET, IMAGE = torch.randn(3, 4), torch.tensor([1, 2, 0]), torch.randn(1, 2, 6, 6)


@pytest.mark.parametrize(
    ("op", "args", "ignored"),
    [
        (aten.cross_entropy_loss.default, (X, TARGET, None, 1, -100, 0.1), "label_smoothing=0.1"),
        (aten._upsample_bilinear2d_aa.default, (IMAGE, [3, 3], False, 0.6, 0.6), "scales_h=0.6"),
        (
            aten._upsample_bilinear2d_aa.vec,
            (IMAGE, None, False, [0.6, 0.6]),
            "scales_h=0.6",
        ),  # by its decomposition
        (
            aten.avg_pool2d.default,
            (IMAGE, [2, 2], [2, 2], [0, 0], False, True, 3),
            "divisor_override=3",
        ),
    ],
    ids=lambda given: str(given) if isinstance(given, str) else "",
)
def test_an_argument_that_would_be_ignored_is_refused(op, args, ignored):
    assert f"ignores {ignored}" in str(refusal_of(op, *args))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.cross_entropy_loss.default, (X, TARGET)),
        (aten.cross_entropy_loss.default, (X, TARGET, None, 1, -100, 0.0)),
        (aten.embedding.default, (X, TARGET, 1)),  # padding_idx is of the gradient
        (aten.clone.default, (X,)),
        (aten._upsample_bilinear2d_aa.default, (IMAGE, [3, 3], False)),
    ],
    ids=range(5),
)
def test_arguments_that_change_nothing_are_taken(op, args):
    assert refusal_of(op, *args) is None


def test_what_reads_offsets_unchecked_is_refused():
    table, offsets = torch.randn(9, 4), torch.tensor([0, 2])
    op = torch.ops.aten.embedding_bag.default
    for kwargs in ({}, {"mode": 1, "include_last_offset": True}):
        assert "reads at unchecked offsets" in str(refusal_of(op, table, TARGET, offsets, **kwargs))


def test_a_cross_product_over_the_first_dimension_of_three():
    square = torch.randn(3, 3)
    assert "a cross product without dim" in str(refusal_of(aten.cross.default, square, square))
    assert refusal_of(aten.cross.default, square, square, -1) is None
