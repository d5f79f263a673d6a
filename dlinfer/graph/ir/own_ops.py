"""Ops that only passes put into graphs, for engines to look for."""

from collections.abc import Callable

import torch
from torch.library import Library, infer_schema, register_fake

from dlinfer.graph.torch_private.dispatcher import OpOverload

NAMESPACE = "dlinfer_graph"
_library = Library(NAMESPACE, "DEF")

CHECKS = {"aten::_assert_async", "aten::_assert_scalar"}
"""Schema names of ops that return nothing and only raise."""


def own_op(
    reference: Callable[..., None],
    check: Callable[..., None],
    *,
    mutates: tuple[str, ...] = (),
    only_raises: bool = False,
) -> OpOverload:
    """Define an op that returns nothing: ``reference`` runs it on any device, ``check`` on fakes.

    only_raises: it computes nothing, so a region of values may run it on its inputs before the engine runs.
    """
    name = reference.__name__
    _library.define(name + infer_schema(reference, mutates_args=mutates), tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    register_fake(f"{NAMESPACE}::{name}", check, lib=_library)
    if only_raises:
        CHECKS.add(f"{NAMESPACE}::{name}")
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload
