"""The options of the engine ``sophgo``, set by ``options={"engine_options": {...}}``."""

from dataclasses import dataclass
from typing import Any

import torch

from dlinfer.graph.engine_kit.options import EngineOptions, one_of, option, refuse, whole
from dlinfer.vendor.sophgo.compiler.options import QUANTIZE, BmodelOptions
from dlinfer.vendor.sophgo.errors import SophgoOptionError

AUTO = "auto"
_MOST_CORES = "bm1688"
"""The engine's chip with the most cores. Options are checked for this chip while the chip is not chosen yet."""
_BY_DTYPE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _as_the_compiler(value: Any) -> Any:
    """Accept any value. ``BmodelOptions`` checks it later."""
    return value


@dataclass(frozen=True)
class SophgoOptions(EngineOptions):
    """Options of the engine for one compilation.

    chip: bm1684x or bm1688; ``auto`` takes this machine's chip or, without one, an emulated chip (chip.py).
    quantize: the format that the chip computes in (``QUANTIZE``); ``auto`` takes the region's own dtype.
    cores, group_size, timeout: the options of ``BmodelOptions`` with these names.
    device: the number of the device that runs regions.
    max_shapes: the greatest number of sets of sizes that a region is compiled for. torch runs calls with other
        sizes."""

    chip: str = option(AUTO, _as_the_compiler)
    quantize: str = option(AUTO, one_of(AUTO, *QUANTIZE))
    cores: int = option(1, _as_the_compiler)
    group_size: int = option(64, _as_the_compiler)
    timeout: float = option(BmodelOptions.timeout, _as_the_compiler)
    device: int = option(0, whole(0))
    max_shapes: int = option(8, whole(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chip == "bm1690":
            expected = "bm1684x or bm1688: dlinfer compiles for bm1690, but has no runtime for it"
            refuse("chip", self.chip, expected)
        try:
            self.compiler(torch.float32)
        except SophgoOptionError as error:
            refuse(str(error.fields["option"]), error.fields["given"], str(error.fields["expected"]))

    def compiler(self, dtype: torch.dtype) -> BmodelOptions:
        """Return the compiler's options for a region that computes in ``dtype``."""
        return BmodelOptions(
            chip=_MOST_CORES if self.chip == AUTO else self.chip,
            quantize=_BY_DTYPE[dtype] if self.quantize == AUTO else self.quantize,
            cores=self.cores,
            group_size=self.group_size,
            timeout=self.timeout,
        )
