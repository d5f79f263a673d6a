"""Names of the functions that a program's steps call, as text that another process can resolve."""

import builtins
import math
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.autograd.graph import increment_version

from dlinfer.graph.ir.layout import LAYOUT, laid_out
from dlinfer.graph.ir.result_check import CHECK, check_result
from dlinfer.graph.torch_private.dispatcher import HigherOrderOperator, OpOverload

COUNT_WRITES = "count_writes"
"""The callee of the step that increments ``tensor._version`` of each tensor in a list.

Kernels that are called below torch's dispatcher do not increment this counter. Engines with copies of weights need the
counter to notice writes."""

_aten = torch.ops.aten
# View ops -> the Python functions of torch that do the same. The functions parse arguments in C for one signature, in
# 1 us. An OpOverload matches its schema at each call, which takes 2 to 12 us, longer than the view itself.
_QUICK: dict[object, Callable[..., object]] = {
    _aten.expand.default: torch.Tensor.expand,
    _aten.flatten.using_ints: torch.flatten,
    _aten.permute.default: torch.permute,
    _aten.reshape.default: torch.reshape,
    _aten.select.int: torch.select,
    _aten.split_with_sizes.default: torch.split_with_sizes,
    _aten.squeeze.dim: torch.squeeze,
    _aten.transpose.int: torch.transpose,
    _aten.unflatten.int: torch.Tensor.unflatten,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
}

_MODULES: dict[str, ModuleType] = {"operator": operator, "torch": torch, "math": math, "builtins": builtins}


def reference(target: Callable[..., object] | str) -> str:
    """Return the name of a function as text that ``resolve`` reads.

    The text is ``op aten.view.default``, ``py operator.mul`` or ``higher cond``. Raises TypeError for a target that is
    neither an op nor a function of ``_MODULES``.
    """
    if isinstance(target, OpOverload):
        return f"op {target}"
    if isinstance(target, HigherOrderOperator):
        return f"higher {target.name()}"
    for name, module in _MODULES.items():
        function = getattr(target, "__name__", "")
        if getattr(module, function, None) is target:
            return f"py {name}.{function}"
    raise TypeError(f"{target} cannot be stored by name")


def resolve(text: str) -> Callable[..., Any]:
    """Return the function that a reference names. Raises AttributeError or KeyError if there is none."""
    kind, _, path = text.partition(" ")
    own = {LAYOUT: laid_out, COUNT_WRITES: increment_version, CHECK: check_result}
    if kind in own:
        return own[kind]
    if kind == "op":
        namespace, name, overload = path.split(".")
        op: Callable[..., object] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        return _QUICK.get(op, op)
    if kind == "higher":
        return getattr(torch.ops.higher_order, path)
    module, _, name = path.partition(".")
    return getattr(_MODULES[module], name)
