"""Define dlinfer's graph ops: only dlinfer puts them into graphs, and engines look for them."""

from collections.abc import Callable
from typing import Any

import torch

from dlinfer.graph.torch_private.dispatcher import Op

torch_library: Any = torch.library  # which torch does not type

_library = torch_library.Library("dlinfer_graph", "DEF")

CHECKS = {"aten::_assert_async", "aten::_assert_scalar"}
"""Schema names of ops that only assert: they may raise, and return nothing."""


def own_op(
    reference: Callable[..., None],
    check: Callable[..., None],
    *,
    mutates: tuple[str, ...] = (),
    only_raises: bool = False,
) -> Op:
    """Define and return an op that returns nothing, named after ``reference``.

    reference: runs the op on any device. check: runs the op on fakes. mutates: the parameters that the op writes.
    only_raises: whether the op only asserts. A functionalized region may run such an op on the region's inputs before
        the engine runs.
    """
    name = reference.__name__
    if only_raises:
        CHECKS.add(f"{_library.ns}::{name}")
    schema = torch_library.infer_schema(reference, mutates_args=mutates)
    return define_op(_library, name, schema, reference, check)


def define_op(
    library: Any, name: str, schema: str, run: Callable[..., object], shapes: Callable[..., object]
) -> Op:
    """Define an op in a library and return its overload. run: runs the op on any device. shapes: its fake function."""
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, run, "CompositeExplicitAutograd")
    torch_library.register_fake(f"{library.ns}::{name}", shapes, lib=library)
    return getattr(getattr(torch.ops, library.ns), name).default
