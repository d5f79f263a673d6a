"""LiteNetwork: a model that can be run."""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from dlinfer.vendor.megengine.errors import LiteError, LiteModelError
from dlinfer.vendor.megengine.lite import decryption
from dlinfer.vendor.megengine.lite.binding import devices
from dlinfer.vendor.megengine.lite.binding.checks import instance, member, text, whole, wrong
from dlinfer.vendor.megengine.lite.binding.enums import LiteBackend, LiteTensorPhase
from dlinfer.vendor.megengine.lite.binding.library import library
from dlinfer.vendor.megengine.lite.callbacks import Callbacks, TensorsByIo, inside_callback
from dlinfer.vendor.megengine.lite.config import LiteConfig, LiteNetworkIO, NativeIO
from dlinfer.vendor.megengine.lite.network_settings import ASYNCHRONOUS_PROFILE, NetworkSettings
from dlinfer.vendor.megengine.lite.sharing import MemoryGroup
from dlinfer.vendor.megengine.lite.tensor import Kept, LiteTensor

_LOADS_ONCE = "a network gets a model only once, by load or share_weights_with; create another LiteNetwork"
"""The reason to refuse a second model: the library would load the first model again and replace its tensors."""

_PATIENCE = 10.0
"""Seconds that a finalizer waits for a network's run to end before it destroys the network."""

_under_way: set["LiteNetwork"] = set()
"""Networks in an asynchronous run. This set keeps each network alive until its run has ended."""


class LiteNetwork(NetworkSettings):
    """A model that can be run. One thread at a time may use a network, but different networks may run concurrently.

    All methods raise LiteArgumentError for a bad argument and LiteError if the library fails."""

    def __init__(self, config: LiteConfig | None = None, io: LiteNetworkIO | None = None) -> None:
        call = "LiteNetwork"
        config = instance(call, "config", LiteConfig, LiteConfig() if config is None else config)
        io = instance(call, "io", LiteNetworkIO, LiteNetworkIO() if io is None else io)
        member(call, "backend", LiteBackend, config.backend)  # any other would crash the process
        native = LiteConfig.from_buffer_copy(config)
        native.device_type = devices.usable(call, config.device_type)
        native_io = NativeIO(io)
        handle = ctypes.c_void_p()
        library().call("make_network", ctypes.byref(handle), native, native_io, said=call)
        self._handle = handle
        self._kept: list[Any] = [config, native_io]
        self._memory: dict[tuple[str, int], Kept] = {}
        self._callbacks = Callbacks(weakref.ref(self))
        self._decryption = (config.bare_model_cryption_name or b"").decode()
        self._group = MemoryGroup()
        self._idle = threading.Event()
        self._idle.set()
        self._begun = False
        self._started = False
        self._record_level = config.options.comp_node_seq_record_level
        self._asynchronous = False
        self._profiled = False
        self._last_callback = "async_with_callback"
        self._no_copy = bool(
            config.options.force_output_dynamic_alloc or config.options.force_output_use_user_specified_memory
        )
        # The callbacks and the memory that the library points to must outlive the network.
        kept = (self._kept, self._memory, self._callbacks.natives)
        weakref.finalize(self, _destroy, handle, kept, self._group, self._idle)

    def load(self, path: str | os.PathLike[str] | bytes) -> None:
        """Load the model from a file's path or, as dlinfer's extension, from bytes. A network loads only one model.

        Raises LiteModelError for a file that is missing or damaged, or does not decrypt to a model.
        Raises LiteCallbackError if a decryption function raises.
        Raises LiteError if the network already has a model."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            raise wrong("load", "path", "a path or bytes", type(path).__name__)
        shown = "of bytes" if isinstance(path, bytes) else os.fspath(path)
        try:
            memory = _read(path)
        except OSError as error:
            raise LiteModelError(path=shown, detail=str(error)) from error
        if not len(memory):
            raise LiteModelError(path=shown, detail="it is empty")
        damage = decryption.damage(self._decryption, memoryview(memory).cast("B"))
        if damage is not None:
            raise LiteModelError(path=shown, detail=damage)
        if self._begun:
            raise LiteError(call="load", detail=_LOADS_ONCE)
        self._begun = True
        self._kept.append(memory)  # the library reads weights in place
        with decryption.watched():
            try:
                library().call("load_model_from_mem", self._handle, memory, len(memory), said="load")
            except LiteError as error:
                if type(error) is not LiteError:
                    raise
                raise LiteModelError(path=shown, detail=error.fields["detail"]) from error

    # --- running it

    def forward(self) -> None:
        """Start a run. The caller must then call ``wait``, which ends the run.

        An asynchronous run also ends with the callback of ``async_with_callback``.
        Raises LiteBusyError while a network that shares this one's run-time memory runs.
        Raises LiteCallbackError if a callback raised.
        Raises LiteError if the library fails.
        Raises LiteError if a callback of this network calls it.
        Raises LiteError if the last asynchronous run has not ended."""
        self._refuse_inside("forward")
        if self._asynchronous and self._no_copy:
            detail = (
                "the library does not call the callback if outputs are not copied (options force_output_...)"
            )
            raise LiteError(call="forward", detail=detail)
        if self._asynchronous and not self._idle.is_set():
            raise LiteError(call="forward", detail="the last run has not ended; call wait() first")
        self._callbacks.raise_failure()
        self._group.begin(self._number, "forward")
        if self._asynchronous:
            self._idle.clear()
            _under_way.add(self)
        self._started = self._begun  # without a model the library fails and starts nothing
        try:
            library().call("forward", self._handle)
        except BaseException:
            self._end()
            raise
        if not self._asynchronous:  # else ``wait`` or the next ``forward`` raises it
            try:
                self._callbacks.raise_failure()
            except BaseException:
                self.wait()
                raise

    def wait(self) -> None:
        """Wait until the run has ended. Raises LiteError, and LiteCallbackError if a callback raised."""
        self._refuse_inside("wait")
        try:
            if self._asynchronous:
                self._idle.wait()  # LITE_wait would call the callback again
            else:
                library().call("wait", self._handle)
        finally:
            self._end()
        self._callbacks.raise_failure()

    def _refuse_inside(self, call: str) -> None:
        if inside_callback(self._callbacks.mark):
            raise LiteError(call=call, detail="a callback of the network called it during the run")

    def _end(self) -> None:
        self._group.end(self._number)
        _under_way.discard(self)
        self._idle.set()  # last: a waiting thread may begin the next run at once

    @property
    def _number(self) -> int:
        return self._handle.value or 0

    def async_with_callback(self, async_callback: Callable[[], Any]) -> None:
        """Let ``forward`` return at once, and call ``async_callback()`` when the run has ended.

        A thread of the library calls ``async_callback``, and then the finish callback if there is one. If one of these
        callbacks raises, the next ``wait`` or ``forward`` raises LiteCallbackError. Raises LiteError if the network
        writes a profile of its runs."""
        call = "async_with_callback"
        if self._profiled:
            raise LiteError(call=call, detail=ASYNCHRONOUS_PROFILE)
        native = self._callbacks.without_arguments(call, async_callback)
        library().call("set_async_callback", self._handle, native, said=call)
        self._asynchronous = True

    def _callback_ended(self, callback: str) -> None:
        """Mark an asynchronous run as ended, if ``callback`` is the last one that the library calls in a run."""
        if self._asynchronous and self._last_callback == callback:
            self._end()

    def set_start_callback(self, start_callback: Callable[[TensorsByIo], Any]) -> None:
        """Call ``start_callback(inputs)`` before each run. ``inputs`` is a dict from LiteIO to LiteTensor."""
        native = self._callbacks.with_tensors("set_start_callback", start_callback)
        library().call("set_start_callback", self._handle, native)

    def set_finish_callback(self, finish_callback: Callable[[TensorsByIo], Any]) -> None:
        """Call ``finish_callback(outputs)`` after each run. ``outputs`` is a dict from LiteIO to LiteTensor."""
        call = "set_finish_callback"
        native = self._callbacks.with_tensors(call, finish_callback)
        library().call(call, self._handle, native)
        self._last_callback = call

    # --- inputs and outputs

    def get_io_tensor(self, name: str, phase: int = LiteTensorPhase.LITE_IO) -> LiteTensor:
        """Return an input or output of the network, which owns the tensor.

        phase: LITE_INPUT or LITE_OUTPUT chooses, if an input and an output have the same name."""
        call = "get_io_tensor"
        key = text(call, "name", name), member(call, "phase", LiteTensorPhase, phase)
        return self._tensor(name, library().ask(call, self._handle, *key, said=f"{call}({name!r})"))

    def _tensor(self, name: str, address: int) -> LiteTensor:
        """Wrap the network's tensor at this address. The network keeps alive the memory that the tensor shares."""
        kept = self._memory.setdefault((name, address), Kept())
        tensor = LiteTensor._of(ctypes.c_void_p(address), kept, owned=False)
        tensor.network = self
        return tensor

    def get_input_name(self, index: int) -> str:
        return self._named("get_input_name", index, len(self.get_all_input_name()))

    def get_output_name(self, index: int) -> str:
        """Return the name of output ``index``. Raises LiteError if the first run has freed the graph."""
        self._with_graph("get_output_name")
        return self._named("get_output_name", index, len(self.get_all_output_name()))

    def get_all_input_name(self) -> list[str]:
        return self._names("get_all_input_name")

    def get_all_output_name(self) -> list[str]:
        return self._names("get_all_output_name")

    def _named(self, call: str, index: int, count: int) -> str:
        whole(call, "index", index, 0, count - 1)
        return (library().ask(call, self._handle, index) or b"").decode()

    def _names(self, call: str) -> list[str]:
        count = ctypes.c_size_t()
        library().call(call, self._handle, ctypes.byref(count), None)
        names = (ctypes.c_char_p * count.value)()
        library().call(call, self._handle, ctypes.byref(count), names)
        return [(name or b"").decode() for name in names]

    # --- sharing

    def share_weights_with(self, src_network: "LiteNetwork") -> None:
        """Use ``src_network``'s model and weights instead of a model of this network's own.

        Both networks may run concurrently."""
        call = "share_weights_with"
        instance(call, "src_network", LiteNetwork, src_network)
        if self._begun:
            raise LiteError(call=call, detail=_LOADS_ONCE)
        library().call("shared_weight_with_network", self._handle, src_network._handle, said=call)
        self._begun = True
        self._kept.append(src_network._kept)

    def share_runtime_memroy(self, src_network: "LiteNetwork") -> None:
        """Share ``src_network``'s run-time memory, which is all memory but weights and graph.

        Call this before ``load``. After ``load`` it raises LiteError. While one of the two networks runs, the other's
        ``forward`` raises LiteBusyError. MegEngine's document spells the name like this."""
        call = "share_runtime_memroy"
        source = instance(call, "src_network", LiteNetwork, src_network)._with_graph(call)
        with self._group.joining(call, src_network._group):
            library().call(call, self._handle, source)
        self._kept.append(src_network)  # the owner of the memory


def _read(path: str | os.PathLike[str] | bytes) -> ctypes.Array[ctypes.c_char]:
    """Return a model's bytes in new memory. path: a file's path, or the bytes themselves. Raises OSError."""
    if isinstance(path, bytes):
        return (ctypes.c_char * len(path)).from_buffer_copy(path)
    with open(path, "rb") as file:
        memory = (ctypes.c_char * os.fstat(file.fileno()).st_size)()
        if memory and file.readinto(memory) != len(memory):
            raise OSError(f"{path} changed while it was read")
    return memory


def _destroy(*arguments: Any) -> None:
    if inside_callback():  # a thread of the library, which cannot wait for itself
        threading.Thread(target=_destroy_now, args=arguments).start()
    else:
        _destroy_now(*arguments)


def _destroy_now(handle: ctypes.c_void_p, kept: Any, group: MemoryGroup, idle: threading.Event) -> None:
    """Wait until the network's run has ended, then destroy the network.

    kept: all objects that the library points to. This argument keeps them alive until the function returns."""
    idle.wait(_PATIENCE)
    library().call("destroy_network", handle)
    group.end(handle.value or 0)
