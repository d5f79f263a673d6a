"""The enumerations of sail: dtypes, flags of BMRuntime, and results of ``process``."""

from enum import IntEnum, IntFlag
from typing import Any

import numpy as np

from dlinfer.vendor.sophgo.errors import SophgoCallError


class Dtype(IntEnum):
    """The dtype of a tensor, with the numbers of bm_data_type_t."""

    BM_FLOAT32 = 0
    BM_FLOAT16 = 1
    BM_INT8 = 2
    BM_UINT8 = 3
    BM_INT16 = 4
    BM_UINT16 = 5
    BM_INT32 = 6
    BM_UINT32 = 7
    BM_BFLOAT16 = 8

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        raise SophgoCallError(call="sail.Dtype", detail=f"{value!r} is not the type of a tensor's elements")


class BmrtFlag(IntFlag):
    """Flags of BMRuntime for ``EngineLLM``, with the bits of bm_runtime_flag_t."""

    BM_RUNTIME_AUTO = 0
    BM_RUNTIME_SHARE_MEM = 1
    BM_RUNTIME_CHECK_MEM = 2

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        if not isinstance(value, int):
            raise SophgoCallError(call="sail.BmrtFlag", detail=f"{value!r} is not a combination of flags")
        return super()._missing_(value)


class Failure(IntEnum):
    """The result of ``EngineLLM.process``. If the last call failed, ``engine.last_error`` has the reason."""

    NONE = 0
    ARGUMENT = 1  # A tensor, a shape, an index or a name does not fit.
    RUNTIME = 2  # BMRuntime refused or failed.
    WORKER = 3  # The worker process of BMRuntime is gone.
    TIMEOUT = 4  # The worker did not answer in time and was killed.


FLOATING = frozenset({Dtype.BM_FLOAT32, Dtype.BM_FLOAT16, Dtype.BM_BFLOAT16})

# numpy's type -> element type. 64-bit integers become 32-bit ones if their values fit.
OF_NUMPY = {
    np.dtype(dtype.name.removeprefix("BM_").lower()): dtype for dtype in Dtype if dtype != Dtype.BM_BFLOAT16
}

# Element type -> numpy's type. 16-bit floats are passed as their bits, as sail does.
_BITS = np.dtype(np.uint16)
NUMPY = {dtype: kind for kind, dtype in OF_NUMPY.items()} | {
    Dtype.BM_FLOAT16: _BITS,
    Dtype.BM_BFLOAT16: _BITS,
}
