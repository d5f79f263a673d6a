"""Options of Sophgo's compiler, checked before the compiler starts."""

import re
import threading
from dataclasses import dataclass
from typing import Any

from dlinfer.vendor.sophgo.errors import SophgoOptionError

CHIPS = {"bm1684x": 1, "bm1688": 2, "bm1690": 8}
"""Chip's name -> number of its cores."""

QUANTIZE = {
    "F32": "float32 for everything",
    "F16": "float16",
    "BF16": "bfloat16",
    "INT8": "int8, with ranges from calibration inputs; float32 in and out",
    "W8F16": "weights of matrix products int8, the rest float16",
    "W8BF16": "weights of matrix products int8, the rest bfloat16",
    "W4F16": "weights of matrix products int4 in groups, the rest float16",
    "W4BF16": "weights of matrix products int4 in groups, the rest bfloat16",
}

ADDR_MODES = ("auto", "basic", "io_alone", "io_tag", "io_tag_fuse", "io_reloc", "in_reuse")
"""The compiler's ways to place a net's inputs and outputs in memory.

With ``io_alone`` each net has memory of its own for them; ``sail.EngineLLM.get_input_tensors`` returns this memory."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True)
class BmodelOptions:
    """Options of the compiler. The constructor raises SophgoOptionError for a bad value.

    chip, quantize, addr_mode: an item of ``CHIPS``, ``QUANTIZE`` and ``ADDR_MODES``.
    cores: the number of the chip's cores that a net uses.
    group_size: how many consecutive 4-bit weights of a column share a scale; 0 means whole columns.
    dynamic: whether sizes may be smaller at run time than at compile time.
    timeout: seconds until the compiler is killed. It is not a part of ``identity``."""

    chip: str = "bm1684x"
    quantize: str = "F16"
    addr_mode: str = "io_alone"
    cores: int = 1
    group_size: int = 64
    dynamic: bool = False
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        _one_of("chip", self.chip, CHIPS)
        _one_of("quantize", self.quantize, QUANTIZE)
        _one_of("addr_mode", self.addr_mode, ADDR_MODES)
        most = CHIPS[self.chip]
        fits = _is_number(self.cores) and 1 <= self.cores <= most
        require(fits, "cores", self.cores, f"1 to {most}, the cores of {self.chip}")
        fits = _is_number(self.group_size) and self.group_size >= 0 and self.group_size % 32 == 0
        require(fits, "group_size", self.group_size, "a multiple of 32, or 0 for whole columns")
        require(isinstance(self.dynamic, bool), "dynamic", self.dynamic, "True or False")
        longest = threading.TIMEOUT_MAX
        fits = isinstance(self.timeout, (int, float)) and 0 < self.timeout <= longest
        require(fits, "timeout", self.timeout, f"seconds above 0, at most {longest:.0f}")

    def identity(self) -> dict[str, Any]:
        """Return all options that change the compiled net, as a dict."""
        return {name: value for name, value in vars(self).items() if name != "timeout"}


def check_name(name: str) -> None:
    """Raise SophgoOptionError for a bad name of a net.

    The compiler writes the name into shell commands."""
    expected = "up to 100 letters, digits and underscores, not a digit first"
    require(_NAME.fullmatch(name) is not None, "name", name, expected)


def require(fits: bool, option: str, value: Any, expected: str) -> None:
    if not fits:
        raise SophgoOptionError(option=option, given=value, expected=expected)


def _one_of(option: str, value: Any, allowed: Any) -> None:
    require(
        value in tuple(allowed), option, value, f"one of {', '.join(allowed)}"
    )  # a tuple, since lists lack hashes


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
