"""Write and read the names of the functions that a graph calls. Only functions of a closed list are accepted.

A file can name ops of torch's dispatcher in three namespaces, and arithmetic on sizes. It cannot name any other
function, an attribute or a piece of Python.
"""

import importlib
import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch

from dlinfer.graph.codec.arguments import CodecError, Json
from dlinfer.graph.ir.dialect import SYMBOLIC_FUNCTIONS
from dlinfer.graph.ir.program import Function
from dlinfer.graph.torch_private.dispatcher import OpOverload, is_dispatched

NAMESPACES = ("aten", "prims", "dlinfer")

# Prefixes of ops that read files, print, or belong to torch's own tests.
_REFUSED = ("aten::from_file", "aten::_print", "aten::_test_")

_OP = re.compile(r"([A-Za-z0-9_]+)::([A-Za-z0-9_]+)(?:\.([A-Za-z0-9_]+))?", re.ASCII)

_OPERATORS = "add sub mul floordiv mod truediv neg pos abs eq ne lt le gt ge and_ or_ not_ xor getitem"
_ARITHMETIC: dict[str, Function] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"torch.{name}": getattr(torch, name) for name in SYMBOLIC_FUNCTIONS},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    "round": round,
}
_NAMES = {function: name for name, function in _ARITHMETIC.items()}
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def call_text(target: object) -> str:
    """Return the name of an op or of arithmetic (``operator.mul``). Raises CodecError for other targets."""
    if isinstance(target, OpOverload):
        return target.name()
    if callable(target) and target in _NAMES:
        return _NAMES[target]
    raise CodecError(f"{target} cannot be stored")


def resolve_call(text: Json, allowed: Collection[str] = ()) -> Function:
    """Return the op or arithmetic function that a text names.

    allowed: names of trusted ops of other namespaces.
    Raises CodecError for any other text, and for an op that this process does not have.
    """
    if not isinstance(text, str):
        raise CodecError(f"the op of a call is a {type(text).__name__}, not text")
    if text in _ARITHMETIC:
        return _ARITHMETIC[text]
    parts = _OP.fullmatch(text)
    if parts is None:
        raise CodecError(f"{text[:80]!r} is not the name of an op")
    namespace, name, overload = parts.groups("default")
    if namespace not in NAMESPACES and text not in allowed:
        raise CodecError(
            f"op {text} belongs to none of the namespaces {', '.join(NAMESPACES)}, and allow_ops does "
            "not list it"
        )
    if text.startswith(_REFUSED):
        raise CodecError(f"op {text} is not allowed in stored graphs")
    if namespace == "dlinfer":
        importlib.import_module("dlinfer.ops")  # registers them
    op = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(op, OpOverload) or not is_dispatched(text):
        raise CodecError(f"this process has no op {text}")
    return cast("Function", op)


def check_call(function: Function, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raise CodecError if a call passes arguments that a stored graph must not have.

    Arithmetic takes sizes only. The call of an op may have only keywords that are in the op's schema.
    """
    if isinstance(function, OpOverload):
        unknown = set(kwargs) - {argument.name for argument in function._schema.arguments}  # pyright: ignore[reportPrivateUsage]
        if unknown:
            raise CodecError(f"{function} has no parameters {sorted(unknown)}")
        return
    if kwargs:
        raise CodecError(f"{_NAMES[function]} takes no keywords")
    if function is operator.getitem:
        if len(args) != 2 or not isinstance(args[0], (tuple, list)) or type(args[1]) is not int:
            raise CodecError("operator.getitem is only for results of several tensors")
        return
    is_sum = function is _ARITHMETIC["torch.sym_sum"] and args
    numbers = cast("Sequence[object]", args[0]) if is_sum else args
    if not all(isinstance(value, _NUMBERS) for value in numbers):
        raise CodecError(f"{_NAMES[function]} is only for sizes")
