"""Checks that cannot fail are dropped; those that can still raise, wherever a number comes from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
from dlinfer.graph.passes.redundant_asserts import REDUNDANT_ASSERTS
from dlinfer.graph.torch_private.dynamo import mark_unbacked
from tests.graph.compiling import compiled
from tests.graph.passes.fusion.capturing import CapturedGraph, captured
from tests.torch_releases import IS_2_12

pytestmark = pytest.mark.usefixtures("graph_mode")


def checks(graph: CapturedGraph) -> list[str]:
    """What the checks of a graph say."""
    nodes = graph.graph_module.graph.nodes
    return [node.args[1] for node in nodes if node.target is torch.ops.aten._assert_scalar.default]


def cleaned(function: Callable[..., Any], *given: Any) -> CapturedGraph:
    graph = captured(function, *given, dynamic=True)
    CSE.run(graph.graph_module)
    DCE.run(graph.graph_module)
    before = graph.run()
    graph.fuse(REDUNDANT_ASSERTS)
    assert {edit.what for edit in graph.edits} <= {"drop check that holds"}
    torch.testing.assert_close(graph.run(), before)
    return graph


def of_any_size(counted: str, *shape: int) -> Tensor:
    made = torch.randn(shape)
    mark_unbacked(made, 0, counted)
    return made


def halves(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y.sum()


def test_sizes_without_examples_are_not_checked_for_being_sizes() -> None:
    graph = cleaned(halves, of_any_size("rows", 5, 3), of_any_size("others", 7, 3))
    assert graph.edits and not [said for said in checks(graph) if ">= 0" in said]


def item_of(x: Tensor, count: Tensor) -> Tensor:
    number = count.item()
    torch._check(number >= 0)
    torch._check(number <= x.shape[0])
    return x[:number] * 2


def test_a_number_that_data_give_is_checked() -> None:
    graph = cleaned(item_of, torch.randn(5, 3), torch.tensor(3))
    assert IS_2_12 or [
        said for said in checks(graph) if ">= 0" in said
    ]  # torch 2.12 writes it in another way
    run = compiled(item_of, dynamic=True)
    x = torch.randn(5, 3)
    torch.testing.assert_close(run(x, torch.tensor(3)), item_of(x, torch.tensor(3)))
    for wrong in (-1, 6):
        with pytest.raises(Exception, match=r"Runtime assertion|Expected cond"):
            run(x, torch.tensor(wrong))


def halves_of_equals(x: Tensor, y: Tensor) -> Tensor:
    torch._check(x.shape[0] == y.shape[0])
    return x + y


def test_two_sizes_are_checked_for_being_equal_and_one_is_not() -> None:
    one, other = of_any_size("rows", 4, 3), of_any_size("others", 4, 3)
    assert [said for said in checks(cleaned(halves_of_equals, one, other)) if "Eq(" in said]
    run = compiled(halves_of_equals, dynamic=True)
    torch.testing.assert_close(run(one, other), one + other)
    longer = of_any_size("others", 6, 3)
    with pytest.raises(Exception, match=r"Eq\(|size"):
        run(one, longer)
