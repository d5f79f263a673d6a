"""References to what a step calls, as text that another process understands."""

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from dlinfer.graph.ir.layout import LAYOUT, laid_out
from dlinfer.graph.seam.dispatcher import HigherOrderOperator

_MODULES: dict[str, Any] = {"operator": operator, "torch": torch, "math": math, "builtins": builtins}


def reference(target: Any) -> str:
    """``op aten.view.default`` for an op, ``py operator.mul`` for arithmetic on sizes, ``higher cond`` for cond."""
    if isinstance(target, OpOverload):
        return f"op {target}"
    if isinstance(target, HigherOrderOperator):
        return f"higher {target.name()}"
    for name, module in _MODULES.items():
        if getattr(module, target.__name__, None) is target:
            return f"py {name}.{target.__name__}"
    raise TypeError(f"{target} has no reference")


def resolve(text: str) -> Callable[..., Any]:
    """The function that a reference names. Raises AttributeError or KeyError where there is none."""
    kind, _, path = text.partition(" ")
    if kind == LAYOUT:
        return laid_out
    if kind == "op":
        namespace, name, overload = path.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    if kind == "higher":
        return getattr(torch.ops.higher_order, path)
    module, _, name = path.partition(".")
    return getattr(_MODULES[module], name)
