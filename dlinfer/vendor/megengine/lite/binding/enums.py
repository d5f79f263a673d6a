"""The enumerations of MegEngine Lite, with the values that its document gives."""

from enum import IntEnum


class LiteBackend(IntEnum):
    """What runs a network."""

    LITE_DEFAULT = 0


class LiteDeviceType(IntEnum):
    """Where a tensor lies or a network runs."""

    LITE_CPU = 0
    LITE_CUDA = 1
    LITE_ATLAS = 3
    LITE_NPU = 4
    LITE_DEVICE_DEFAULT = 5


class LiteDataType(IntEnum):
    """Types of a tensor's elements; the numbers are the C header's."""

    LITE_FLOAT = 0
    LITE_HALF = 1
    LITE_INT = 2
    LITE_INT16 = 3
    LITE_INT8 = 4
    LITE_UINT8 = 5
    LITE_UINT16 = 7


class LiteTensorPhase(IntEnum):
    """Which of a network's tensors a name speaks of."""

    LITE_IO = 0
    LITE_INPUT = 1
    LITE_OUTPUT = 2


class LiteIOType(IntEnum):
    """What is wanted of an input or output."""

    LITE_IO_VALUE = 0
    LITE_IO_SHAPE = 1


class LiteAlgoSelectStrategy(IntEnum):
    """How algorithms of ops are chosen; members are combined by ``|``.

    HEURISTIC | PROFILE: by profile where there is one in the cache, else by heuristics. HEURISTIC | REPRODUCIBLE and
    PROFILE | REPRODUCIBLE: among reproducible algorithms. PROFILE | OPTIMIZED: among optimised ones, so that profiling
    is quick. PROFILE | OPTIMIZED | REPRODUCIBLE: both.
    """

    LITE_ALGO_HEURISTIC = 1
    LITE_ALGO_PROFILE = 2
    LITE_ALGO_REPRODUCIBLE = 4
    LITE_ALGO_OPTIMIZED = 8


class LiteLogLevel(IntEnum):
    """What the library prints."""

    DEBUG = 0
    INFO = 1
    WARN = 2
    ERROR = 3
