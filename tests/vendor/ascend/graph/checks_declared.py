"""Each graph that the engine makes, against the vendor's declarations of its ops; and faults put into its message.

The interpreter knows ops by functions that were written by hand. What is compared with here is the vendor's own text.
"""

import importlib
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.vendor.ascend.graph import compiling, vendor_process
from tests.vendor.ascend.graph.checks_faults import case
from tests.vendor.ascend.graph.reg_ops.documents import Declared, read_package
from tests.vendor.ascend.graph.reg_ops.rules import faults
from tests.vendor.ascend.vendor_package import environment

MODELS = ("decoder", "prompt", "experts", "eight bits", "latent")
TORCHAIRS_OWN = re.compile(
    r"GroupedMatmul\w*: input antiquant_(scale|offset)0 is FLOAT, and BF16, FLOAT16 are admitted"
)
"""Its converter fills the lists of GroupedMatmul that are not used with empty tensors, of a dtype not declared."""


@cache
def declared() -> dict[str, Declared]:
    return read_package(environment.folder() / "site")


@cache
def graphs(model: str) -> list[Any]:
    """Messages of a model's graphs, as the card's engine would get them."""
    torch._dynamo.reset()
    vendor_process.loaded.clear()
    module, inputs = case(model)
    with torch.no_grad():
        compiling.compiled(module, (), inputs)(*inputs)
    return list(vendor_process.loaded)


@pytest.mark.parametrize("model", MODELS)
def test_graphs_are_as_declared(model):
    assert graphs(model)
    found = [fault for graph in graphs(model) for fault in faults(graph, declared())]
    assert [one for one in found if not TORCHAIRS_OWN.fullmatch(one)] == []
    assert bool(found) == (model == "experts")


Plant = Callable[[Any, Any], Any]
"""(graph, op): spoils the message in place."""


def place(op: Any, name: str) -> int:
    return [desc.name for desc in op.input_desc].index(name)


def swapped(one: str, other: str) -> Plant:
    """Two inputs with their names: right by name, and not in the vendor's order."""

    def plant(graph: Any, op: Any) -> None:
        a, b = place(op, one), place(op, other)
        op.input[a], op.input[b] = op.input[b], op.input[a]
        op.input_desc[a].name, op.input_desc[b].name = other, one

    return plant


def left_out(name: str) -> Plant:
    return lambda graph, op: op.input.__setitem__(place(op, name), "")


def of(dtype: str, name: str) -> Plant:
    """What an input reads is of another dtype."""

    def plant(graph: Any, op: Any) -> None:
        source, _, index = op.input[place(op, name)].rpartition(":")
        messages = importlib.import_module("torchair._ge_concrete_graph.ge_ir_pb2")
        writer = next(one for one in graph.op if one.name == source)
        writer.output_desc[int(index)].dtype = messages.DataType.Value(f"DT_{dtype}")

    return plant


def renamed(name: str, other: str) -> Plant:
    def plant(graph: Any, op: Any) -> None:
        op.attr[other].CopyFrom(op.attr[name])
        del op.attr[name]

    return plant


def put(name: str, kind: str, value: Any) -> Plant:
    def plant(graph: Any, op: Any) -> None:
        op.attr[name].Clear()
        setattr(op.attr[name], kind, value)

    return plant


FIA = "FusedInferAttentionScore"
PLANTED: list[tuple[str, str, Plant, str]] = [
    ("decoder", "SwiGlu", lambda graph, op: setattr(op, "type", "SwiGluV9"), "no op SwiGluV9"),
    ("decoder", "SwiGlu", put("dim", "f", -1.0), "attribute dim is no Int"),
    ("decoder", "SwiGlu", lambda graph, op: op.input.__setitem__(0, "nobody:0"), "no result of an op before"),
    ("decoder", "AddRmsNorm", swapped("x2", "gamma"), "x2 is missing, or not in its place"),
    ("decoder", "AddRmsNorm", left_out("gamma"), "input gamma is missing"),
    ("decoder", "AddRmsNorm", of("INT32", "gamma"), "input gamma is INT32"),
    ("decoder", "AddRmsNorm", renamed("epsilon", "eps"), "eps is not one of its attributes"),
    ("decoder", "AddRmsNorm", put("epsilon", "i", 1), "epsilon is no Float"),
    ("decoder", "AddRmsNorm", lambda graph, op: op.output_desc.pop(), "2 results, and the vendor's op has 3"),
    ("decoder", "AddRmsNorm", lambda graph, op: setattr(op.output_desc[1], "name", "x"), "result x is not"),
    ("decoder", "ScatterPaKvCache", of("FLOAT", "slot_mapping"), "slot_mapping is FLOAT"),
    ("decoder", "ScatterPaKvCache", of("BF16", "value"), "which must be one"),
    ("decoder", "ScatterPaKvCache", put("cache_mode", "i", 0), "cache_mode is no String"),
    ("decoder", FIA, lambda graph, op: op.attr.pop("num_heads"), "attribute num_heads is missing"),
    ("decoder", FIA, of("INT64", "block_table"), "INT32 are admitted"),
    ("decoder", FIA, of("FLOAT", "query"), "query is FLOAT"),
    ("prompt", FIA, of("INT32", "atten_mask"), "atten_mask is INT32"),
    ("experts", "GroupedMatmul", of("INT32", "group_list"), "group_list is INT32"),
    ("experts", "MoeGatingTopKSoftmax", renamed("k", "top_k"), "attribute k is missing"),
    ("experts", "MoeInitRoutingV3", of("INT64", "expert_idx"), "expert_idx is INT64"),
    ("eight bits", "QuantBatchMatmulV3", of("INT32", "x2"), "x2 is INT32"),
]
"""The model, the op, what is done to it, and what must be said."""


@pytest.mark.parametrize(("model", "kind", "plant", "said"), PLANTED, ids=lambda one: str(one)[:40])
def test_a_planted_fault_is_named(model, kind, plant, said):
    real = next(one for one in graphs(model) if any(op.type == kind for op in one.op))
    spoiled = type(real)()
    spoiled.CopyFrom(real)
    plant(spoiled, next(op for op in spoiled.op if op.type == kind))
    assert any(said in one for one in faults(spoiled, declared()))
    assert not any(said in one for one in faults(real, declared()))
