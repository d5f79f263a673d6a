"""LiteOptions, LiteConfig, LiteIO and LiteNetworkIO, as documented. The first three are C structures."""

import ctypes
from collections.abc import Iterable
from typing import Any

from dlinfer.vendor.megengine.lite.binding.checks import member, wrong
from dlinfer.vendor.megengine.lite.binding.enums import LiteBackend, LiteDeviceType, LiteIOType
from dlinfer.vendor.megengine.lite.layout import LiteLayout, copied

_OPTIONS = [
    *"weight_preprocess fuse_preprocess fake_next_exec var_sanity_check_first_run const_shape".split(),
    *"force_dynamic_alloc force_output_dynamic_alloc force_output_use_user_specified_memory".split(),
    *"no_profiling_on_shape_change jit_level comp_node_seq_record_level graph_opt_level async_exec_level".split(),
    *"enable_nchw44 enable_nchw44_dot enable_nchw88 enable_nhwcd4 enable_nchw4 enable_nchw32 enable_nchw64".split(),
]

_RANGES = {
    "jit_level": range(3),
    "comp_node_seq_record_level": range(3),
    "graph_opt_level": range(4),
    "async_exec_level": range(8),
}
"""The values of the options that are levels. All other options are 0 or 1."""


class LiteOptions(ctypes.Structure):
    """The library's options for optimising a network; docs/vendors/vendor_documents.md names the test of each option.

    All options are integers with the library's defaults: var_sanity_check_first_run 1, graph_opt_level 2,
    async_exec_level 1, all others 0. Assigning an unknown option, or a value out of range, raises LiteArgumentError."""

    _fields_ = [(name, ctypes.c_int) for name in _OPTIONS]

    def __init__(self) -> None:
        super().__init__(var_sanity_check_first_run=1, graph_opt_level=2, async_exec_level=1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OPTIONS:
            raise wrong("LiteOptions", name, f"one of {', '.join(_OPTIONS)}", repr(value))
        allowed = _RANGES.get(name, range(2))
        if not isinstance(value, int) or value not in allowed:
            raise wrong("LiteOptions", name, f"{allowed.start} to {allowed.stop - 1}", repr(value))
        super().__setattr__(name, int(value))

    def __repr__(self) -> str:
        return f"LiteOptions({', '.join(f'{name}={getattr(self, name)}' for name in _OPTIONS)})"


class LiteConfig(ctypes.Structure):
    """A network's device, decryption and options.

    has_compression: whether the model is compressed.
    device_id, device_type: the device that the network runs on.
    backend: always LITE_DEFAULT.
    bare_model_cryption_name: the name of the decryption method, as bytes or str; empty for a model that is not
        encrypted.
    options: a LiteOptions."""

    _fields_ = [
        ("has_compression", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("device_type", ctypes.c_int),
        ("backend", ctypes.c_int),
        ("bare_model_cryption_name", ctypes.c_char_p),
        ("options", LiteOptions),
        # The C header has two more, undocumented.
        ("_auto_optimize_inference", ctypes.c_int),
        ("_discrete_input_name", ctypes.c_char_p),
    ]

    def __init__(self, device_type: int = LiteDeviceType.LITE_CPU, option: LiteOptions | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.backend = LiteBackend.LITE_DEFAULT
        self.bare_model_cryption_name = b""
        self.options = option if option is not None else LiteOptions()
        self._discrete_input_name = b""

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name):
            raise wrong("LiteConfig", name, "a documented field", repr(value))
        if name == "bare_model_cryption_name":  # ctypes would take a number as an address
            value = value.encode() if isinstance(value, str) else value
            if not isinstance(value, bytes):
                raise wrong("LiteConfig", name, "bytes or text", repr(value))
        try:
            super().__setattr__(name, value)
        except TypeError as error:
            raise wrong("LiteConfig", name, str(error), repr(value)) from error

    def __repr__(self) -> str:
        fields = (field[0] for field in self._fields_ if not field[0].startswith("_"))
        return f"LiteConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"


class LiteIO(ctypes.Structure):
    """One input or output of a network. Two LiteIO are equal if their names are equal.

    name: the name of the input or output.
    is_host: whether the caller's tensor is in host memory.
    io_type: LITE_IO_VALUE; or LITE_IO_SHAPE for an output if the caller needs only its sizes.
    config_layout: the layout of the input or output, given by the argument ``layout``; None means the model's
        layout."""

    _fields_ = [
        ("_name", ctypes.c_char_p),
        ("is_host", ctypes.c_int),
        ("io_type", ctypes.c_int),
        ("config_layout", LiteLayout),
    ]

    def __init__(
        self,
        name: str | bytes,
        is_host: bool | int = True,
        io_type: int = LiteIOType.LITE_IO_VALUE,
        layout: LiteLayout | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.is_host = int(is_host)
        self.io_type = member("LiteIO", "io_type", LiteIOType, io_type)
        self.config_layout = LiteLayout() if layout is None else copied(layout)

    @property
    def name(self) -> str:
        return (self._name or b"").decode()

    @name.setter
    def name(self, name: str | bytes) -> None:
        if not isinstance(name, (str, bytes)) or not name:
            raise wrong("LiteIO", "name", "text", repr(name))
        self._name = name.encode() if isinstance(name, str) else name

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if isinstance(other, LiteIO) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        kind = LiteIOType(self.io_type).name
        return f"LiteIO({self.name!r}, is_host={bool(self.is_host)}, io_type={kind}, layout={self.config_layout!r})"


class LiteNetworkIO:
    """The inputs and outputs of a network that the caller configures, as two lists of LiteIO.

    inputs, outputs: each item is a LiteIO, or a list of the arguments of a LiteIO."""

    def __init__(self, inputs: Iterable[Any] | None = None, outputs: Iterable[Any] | None = None) -> None:
        self.inputs = [_io(item) for item in inputs or ()]
        self.outputs = [_io(item) for item in outputs or ()]

    def add_input(
        self,
        obj: LiteIO | str,
        is_host: bool = True,
        io_type: int = LiteIOType.LITE_IO_VALUE,
        layout: LiteLayout | None = None,
    ) -> None:
        """Add an input. obj: a LiteIO; or an input's name, and then all arguments together make a LiteIO."""
        self.inputs.append(obj if isinstance(obj, LiteIO) else LiteIO(obj, is_host, io_type, layout))

    def add_output(
        self,
        obj: LiteIO | str,
        is_host: bool = True,
        io_type: int = LiteIOType.LITE_IO_VALUE,
        layout: LiteLayout | None = None,
    ) -> None:
        """Add an output. obj: a LiteIO; or an output's name, and then all arguments together make a LiteIO."""
        self.outputs.append(obj if isinstance(obj, LiteIO) else LiteIO(obj, is_host, io_type, layout))


class NativeIO(ctypes.Structure):
    """The LiteNetworkIO structure of the C header. This object keeps alive the arrays that the structure points to."""

    _fields_ = [
        ("inputs", ctypes.POINTER(LiteIO)),
        ("outputs", ctypes.POINTER(LiteIO)),
        ("input_size", ctypes.c_size_t),
        ("output_size", ctypes.c_size_t),
    ]

    def __init__(self, io: LiteNetworkIO) -> None:
        inputs, outputs = ((LiteIO * len(ios))(*map(_io, ios)) for ios in (io.inputs, io.outputs))
        super().__init__(inputs, outputs, len(inputs), len(outputs))
        self._kept = (inputs, outputs, io)


def _io(item: Any) -> LiteIO:
    if isinstance(item, LiteIO):
        return item
    if isinstance(item, (list, tuple)):
        return LiteIO(*item)
    raise wrong("LiteNetworkIO", "inputs, outputs", "LiteIO or lists of its arguments", repr(item))
