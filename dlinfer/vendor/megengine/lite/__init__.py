"""MegEngine Lite's Python API, under its documented names, on MegEngine Lite's C library.

Write ``from dlinfer.vendor.megengine.lite import *`` where MegEngine's document says ``from megenginelite import *``.
The import loads no library. The first tensor, network or setting loads the toolchain's library.
"""

from dlinfer.vendor.megengine.lite.binding.enums import (
    LiteAlgoSelectStrategy,
    LiteBackend,
    LiteDataType,
    LiteDeviceType,
    LiteIOType,
    LiteLogLevel,
    LiteTensorPhase,
)
from dlinfer.vendor.megengine.lite.config import LiteConfig, LiteIO, LiteNetworkIO, LiteOptions
from dlinfer.vendor.megengine.lite.decryption import decryption_func
from dlinfer.vendor.megengine.lite.global_setting import LiteGlobal, get_log_level, set_log_level
from dlinfer.vendor.megengine.lite.layout import LiteLayout
from dlinfer.vendor.megengine.lite.network import LiteNetwork
from dlinfer.vendor.megengine.lite.tensor import LiteTensor
from dlinfer.vendor.megengine.lite.utils import TensorBatchCollector

__all__ = [
    "LiteAlgoSelectStrategy",
    "LiteBackend",
    "LiteConfig",
    "LiteDataType",
    "LiteDeviceType",
    "LiteGlobal",
    "LiteIO",
    "LiteIOType",
    "LiteLayout",
    "LiteLogLevel",
    "LiteNetwork",
    "LiteNetworkIO",
    "LiteOptions",
    "LiteTensor",
    "LiteTensorPhase",
    "TensorBatchCollector",
    "decryption_func",
    "get_log_level",
    "set_log_level",
]
