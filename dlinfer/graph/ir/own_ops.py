"""Ops of the graph's own: only passes put them into graphs, and engines look for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema, register_fake

NAMESPACE = "dlinfer_graph"
_library = Library(NAMESPACE, "DEF")


def own_op(
    reference: Callable[..., None], check: Callable[..., None], *, mutates: tuple[str, ...] = ()
) -> Any:
    """The overload of an op that returns nothing: ``reference`` runs it on any device, ``check`` on fakes."""
    name = reference.__name__
    _library.define(name + infer_schema(reference, mutates_args=mutates), tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    register_fake(f"{NAMESPACE}::{name}", check, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
