"""Ops whose kernel in ONNX Runtime, or whose translation, gives other numbers than torch's: torch keeps them.

Each was found by running it on numbers of all sizes, zeros of both signs, NaN and infinities.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from dlinfer.graph.ir.dialect import arguments, fake, op_name, overload

_DIGITS = "loses digits where numbers nearly cancel"
_ALWAYS: Mapping[str, str] = {
    **dict.fromkeys(("erfc", "special_erfc", "expm1", "special_expm1", "log1p", "special_log1p"), _DIGITS),
    **dict.fromkeys(("elu", "celu", "selu", "log_sigmoid"), _DIGITS),
    "logaddexp": "overflows where the result does not",
    "atan2": "takes another quadrant for zeros, and 0 for NaN",
    "arctan2": "takes another quadrant for zeros, and 0 for NaN",
    "signbit": "takes -0.0 for a positive number",
    "diagonal": "multiplies by zeros, which infinities do not come through",
    "var_mean": "gives an infinity where the mean is NaN",
    "std_mean": "gives an infinity where the mean is NaN",
}
_OF_INTEGERS: Mapping[str, str] = {
    **dict.fromkeys(("prod", "nansum"), "goes through floats"),
    "pow": "overflows for negative exponents",
}
_OF_FLOATS: Mapping[str, str] = dict.fromkeys(
    ("floor_divide", "remainder", "fmod"), "takes quotients of infinities for NaN, or the other way round"
)


def refusal(node: fx.Node) -> str | None:
    """Why a node is left to torch; None where it is not."""
    op = overload(node)
    if op is None or op.namespace != "aten":
        return None
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    operands = [value for value in map(fake, node.all_input_nodes) if isinstance(value, Tensor)]
    floats = any(value.is_floating_point() for value in operands)
    reason = _ALWAYS.get(name) or (_OF_FLOATS if floats else _OF_INTEGERS).get(name)
    if name == "div" and floats and (mode := arguments(node).get("rounding_mode")) is not None:
        reason = f"rounds quotients by {mode} otherwise where infinities are among them"
    if name in ("chunk", "unsafe_chunk") and len(fake(node)) != arguments(node)["chunks"]:
        reason = "wants as many parts as are asked for, where torch gives fewer"
    if name == "scatter_reduce" and floats and arguments(node)["reduce"] in ("amax", "amin"):
        reason = "passes over NaN"
    if name == "pow" and not floats and not isinstance(arguments(node)["exponent"], fx.Node):
        reason = None
    if name == "prod" and operands and operands[0].dtype is torch.bool:
        reason = None
    return None if reason is None else f"ONNX Runtime's {op_name(node)} {reason}"
