"""What ``options={"engine_options": {...}}`` can tell the engine ``sophgo``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dlinfer.errors import CompileOptionError
from dlinfer.vendor.sophgo.compiler.options import QUANTIZE, BmodelOptions
from dlinfer.vendor.sophgo.errors import SophgoOptionError

AUTO = "auto"
_MOST_CORES = "bm1688"
"""The chip by which options are checked while it is not known."""
_BY_DTYPE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class SophgoOptions:
    """Options of one compilation, validated when they are made. Raises CompileOptionError.

    chip: bm1684x or bm1688, or ``auto``, the machine's own (engine_chip.py).
    quantize: as for the compiler, or ``auto``, the region's own dtype.
    cores, group_size, timeout: as for the compiler. device: number of the device that regions run on.
    max_shapes: bmodels that one region may need for different sizes; more of them run by torch.
    """

    chip: str = AUTO
    quantize: str = AUTO
    cores: int = 1
    group_size: int = 64
    timeout: float = 3600.0
    device: int = 0
    max_shapes: int = 8

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "SophgoOptions":
        """Options from names and values."""
        known = [item.name for item in fields(cls)]
        for name, value in given.items():
            if name not in known:
                _refuse(name, value, f"one of the options of engine 'sophgo': {', '.join(known)}")
        made = cls(**given)
        for name, least in (("device", 0), ("max_shapes", 1)):
            value = getattr(made, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                _refuse(name, value, f"a whole number from {least} on")
        if made.quantize not in (AUTO, *QUANTIZE):
            _refuse("quantize", made.quantize, f"one of {', '.join((AUTO, *QUANTIZE))}")
        if made.chip == "bm1690":
            _refuse(
                "chip", made.chip, "bm1684x or bm1688: dlinfer compiles for bm1690, and has no runtime for it"
            )
        if made.chip == AUTO:
            made.on(_MOST_CORES)
        else:
            made.on(made.chip)
        return made

    def on(self, chip: str) -> "SophgoOptions":
        """The same for a chip. Raises CompileOptionError where it cannot be so."""
        made = replace(self, chip=chip)
        try:
            made.compiler(torch.float32)
        except SophgoOptionError as error:
            _refuse(str(error.fields["option"]), error.fields["given"], str(error.fields["expected"]))
        return made

    def compiler(self, dtype: torch.dtype) -> BmodelOptions:
        """How to compile a region of this floating dtype; not while the chip is ``auto``."""
        quantize = _BY_DTYPE[dtype] if self.quantize == AUTO else self.quantize
        return BmodelOptions(
            chip=self.chip,
            quantize=quantize,
            cores=self.cores,
            group_size=self.group_size,
            timeout=self.timeout,
        )


def _refuse(name: str, given: Any, expected: str) -> None:
    raise CompileOptionError(option=f"engine_options[{name!r}]", given=given, expected=expected)
