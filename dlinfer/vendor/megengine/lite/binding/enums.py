"""The enumerations of MegEngine Lite, with their documented values."""

from enum import IntEnum


class LiteBackend(IntEnum):
    """The backend that runs a network."""

    LITE_DEFAULT = 0


class LiteDeviceType(IntEnum):
    """The device of a tensor or a network."""

    LITE_CPU = 0
    LITE_CUDA = 1
    LITE_ATLAS = 3
    LITE_NPU = 4
    LITE_DEVICE_DEFAULT = 5


class LiteDataType(IntEnum):
    """Element types; the numbers are the C header's."""

    LITE_FLOAT = 0
    LITE_HALF = 1
    LITE_INT = 2
    LITE_INT16 = 3
    LITE_INT8 = 4
    LITE_UINT8 = 5
    LITE_UINT16 = 7


class LiteTensorPhase(IntEnum):
    """The kind of tensor to look up by a name: an input, an output, or either."""

    LITE_IO = 0
    LITE_INPUT = 1
    LITE_OUTPUT = 2


class LiteIOType(IntEnum):
    """The part of an input or output that is needed: its values, or only its sizes."""

    LITE_IO_VALUE = 0
    LITE_IO_SHAPE = 1


class LiteAlgoSelectStrategy(IntEnum):
    """The library's ways to choose an op's algorithm. Combine members by ``|``.

    HEURISTIC | PROFILE: use a cached profile; without one, use heuristics.
    HEURISTIC | REPRODUCIBLE, PROFILE | REPRODUCIBLE: choose only among reproducible algorithms.
    PROFILE | OPTIMIZED: choose only among optimised algorithms, which makes profiling quick.
    PROFILE | OPTIMIZED | REPRODUCIBLE: choose only among algorithms that are both optimised and reproducible."""

    LITE_ALGO_HEURISTIC = 1
    LITE_ALGO_PROFILE = 2
    LITE_ALGO_REPRODUCIBLE = 4
    LITE_ALGO_OPTIMIZED = 8


class LiteLogLevel(IntEnum):
    """The library's log levels. The library prints messages of the chosen level and above."""

    DEBUG = 0
    INFO = 1
    WARN = 2
    ERROR = 3
