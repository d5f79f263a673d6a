"""LiteNetwork: a model that can be run (S1-80 to S1-101)."""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlinfer.vendor.megengine.errors import LiteArgumentError, LiteError, LiteModelError
from dlinfer.vendor.megengine.lite import decryption, devices
from dlinfer.vendor.megengine.lite.callbacks import Callbacks, TensorsByIo, running_one
from dlinfer.vendor.megengine.lite.checks import member, text, whole
from dlinfer.vendor.megengine.lite.config import LiteConfig, LiteNetworkIO, NativeIO
from dlinfer.vendor.megengine.lite.enums import LiteTensorPhase
from dlinfer.vendor.megengine.lite.library import library
from dlinfer.vendor.megengine.lite.sharing import MemoryGroup
from dlinfer.vendor.megengine.lite.tensor import Kept, LiteTensor

_ALL_STRATEGIES = 15

_LOADS_ONCE = (
    "a network loads once, and would give the same model again whatever it gets; make another LiteNetwork"
)

_PATIENCE = 10.0
"""Seconds that the end of Python waits for a run that has not ended."""

_under_way: set["LiteNetwork"] = set()
"""Networks in an asynchronous run, which lasts though nobody else may know them any more."""


class LiteNetwork:
    """A network; one thread at a time may use one, different ones run side by side.

    config: a LiteConfig, the default one where none is given. io: a LiteNetworkIO.
    Raises LiteArgumentError and LiteError.
    """

    def __init__(self, config: LiteConfig | None = None, io: LiteNetworkIO | None = None) -> None:
        config = LiteConfig() if config is None else config
        native = LiteConfig.from_buffer_copy(config)
        native.device_type = devices.usable("LiteNetwork", config.device_type)
        given = NativeIO(io if io is not None else LiteNetworkIO())
        handle = ctypes.c_void_p()
        library().call("make_network", ctypes.byref(handle), native, given, said="LiteNetwork")
        self._handle = handle
        self._kept: list[Any] = [config, given]
        self._memory: dict[tuple[str, int], Kept] = {}
        self._callbacks = Callbacks(weakref.ref(self))
        self._decryption = (config.bare_model_cryption_name or b"").decode()
        self._group = MemoryGroup()
        self._idle = threading.Event()
        self._idle.set()
        self._begun = False
        self._asynchronous = False
        self._no_copy = bool(
            config.options.force_output_dynamic_alloc or config.options.force_output_use_user_specified_memory
        )
        # The callbacks and the memory that the library points to must outlive the network.
        kept = (self._kept, self._memory, self._callbacks.natives)
        weakref.finalize(self, _destroy, handle, kept, self._group, self._idle)

    def load(self, path: str | os.PathLike[str] | bytes) -> None:
        """Load a model, once: a file's path, or the bytes of one (an extension of the document's).

        Raises LiteModelError for one that is not there, damaged, or decrypted to something else than a model.
        """
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
        self._kept.append(memory)  # the library reads weights where they lie
        with decryption.watched():
            try:
                library().call("load_model_from_mem", self._handle, memory, len(memory), said="load")
            except LiteError as error:
                decryption.raise_failure()
                if type(error) is not LiteError:
                    raise
                raise LiteModelError(path=shown, detail=error.fields["detail"]) from error
            decryption.raise_failure()

    # --- running it

    def forward(self) -> None:
        """Start a run (S1-82); ``wait`` ends it, or the callback of ``async_with_callback``.

        Raises LiteError, LiteBusyError where a network runs that shares its run-time memory, LiteCallbackError for
        what a callback raised.
        """
        if self._asynchronous and self._no_copy:
            detail = (
                "outputs that are not copied (force_output_...) have no end that a callback could be told of"
            )
            raise LiteError(call="forward", detail=detail)
        if self._asynchronous and not self._idle.is_set():
            raise LiteError(call="forward", detail="the last run has not ended; wait() for it")
        self._callbacks.raise_failure()
        self._group.begin(self._number, "forward")
        if self._asynchronous:
            self._idle.clear()
            _under_way.add(self)
        try:
            library().call("forward", self._handle)
        except BaseException:
            self._end()
            raise
        if not self._asynchronous:  # else ``wait`` raises it, or the next ``forward``
            try:
                self._callbacks.raise_failure()
            except BaseException:
                self.wait()
                raise

    def wait(self) -> None:
        """Wait until a run has ended (S1-83). Raises LiteError and LiteCallbackError."""
        try:
            if self._asynchronous:
                self._idle.wait()  # LITE_wait would call the callback again
            else:
                library().call("wait", self._handle)
        finally:
            self._end()
        self._callbacks.raise_failure()

    def _end(self) -> None:
        self._group.end(self._number)
        self._idle.set()
        _under_way.discard(self)

    @property
    def _number(self) -> int:
        return self._handle.value or 0

    def async_with_callback(self, async_callback: Callable[[], Any]) -> None:
        """Let ``forward`` return at once; ``async_callback()`` is called when the run has ended (S1-92).

        It is called in a thread of the library. What it raises is raised by the next ``wait`` or ``forward``.
        """
        call = "async_with_callback"
        ended = weakref.WeakMethod(self._end)

        def after() -> None:
            end = ended()
            if end is not None:
                end()

        native = self._callbacks.without_arguments(call, async_callback, after)
        library().call("set_async_callback", self._handle, native, said=call)
        self._asynchronous = True

    def set_start_callback(self, start_callback: Callable[[TensorsByIo], Any]) -> None:
        """Call ``start_callback(inputs)`` before each run, with a dict of LiteIO to LiteTensor (S1-93)."""
        native = self._callbacks.with_tensors("set_start_callback", start_callback)
        library().call("set_start_callback", self._handle, native)

    def set_finish_callback(self, finish_callback: Callable[[TensorsByIo], Any]) -> None:
        """Call ``finish_callback(outputs)`` after each run, with a dict of LiteIO to LiteTensor (S1-94)."""
        native = self._callbacks.with_tensors("set_finish_callback", finish_callback)
        library().call("set_finish_callback", self._handle, native)

    # --- where and how it runs: before ``load``

    @property
    def device_id(self) -> int:
        """Which device it runs on; set it before ``load``, else LiteError."""
        return self._asked("get_device_id")

    @device_id.setter
    def device_id(self, device_id: int) -> None:
        library().call("set_device_id", self._handle, whole("device_id", "device_id", device_id))

    @property
    def stream_id(self) -> int:
        """Which stream it runs in; set it before ``load``, else LiteError."""
        return self._asked("get_stream_id")

    @stream_id.setter
    def stream_id(self, stream_id: int) -> None:
        library().call("set_stream_id", self._handle, whole("stream_id", "stream_id", stream_id))

    @property
    def threads_number(self) -> int:
        """How many threads of the CPU it runs in; set it before ``load``, else LiteError."""
        number = ctypes.c_size_t()
        library().call("get_cpu_threads_number", self._handle, ctypes.byref(number))
        return number.value

    @threads_number.setter
    def threads_number(self, nr_threads: int) -> None:
        number = whole("threads_number", "nr_threads", nr_threads, 1)
        library().call("set_cpu_threads_number", self._handle, number)

    def is_cpu_inplace_mode(self) -> bool:
        """Whether it runs in the caller's thread alone (S1-87)."""
        return bool(self._asked("is_cpu_inplace_mode"))

    def enable_cpu_inplace_mode(self) -> None:
        """Run in the caller's thread alone, which is quicker on one core; before ``load``, else LiteError."""
        library().call("set_cpu_inplace_mode", self._handle, said="enable_cpu_inplace_mode")

    def use_tensorrt(self) -> None:
        """Use TensorRT where the device has it; before ``load``, else LiteError."""
        library().call("use_tensorrt", self._handle)

    def _asked(self, call: str) -> int:
        value = ctypes.c_int()
        library().call(call, self._handle, ctypes.byref(value))
        return value.value

    # --- inputs and outputs

    def get_io_tensor(self, name: str, phase: int = LiteTensorPhase.LITE_IO) -> LiteTensor:
        """The input or output of that name (S1-89); ``phase`` says which where both have it. It stays the network's."""
        handle = ctypes.c_void_p()
        library().call(
            "get_io_tensor",
            self._handle,
            text("get_io_tensor", "name", name),
            member("get_io_tensor", "phase", LiteTensorPhase, phase),
            ctypes.byref(handle),
            said=f"get_io_tensor({name!r})",
        )
        kept = self._memory.setdefault((name, handle.value or 0), Kept())
        tensor = LiteTensor._of(handle, kept, owned=False)
        tensor.network = self
        return tensor

    def get_input_name(self, index: int) -> str:
        """The name of input ``index``."""
        return self._named("get_input_name", index, len(self.get_all_input_name()))

    def get_output_name(self, index: int) -> str:
        """The name of output ``index``."""
        return self._named("get_output_name", index, len(self.get_all_output_name()))

    def get_all_input_name(self) -> list[str]:
        """The names of all inputs."""
        return self._names("get_all_input_name")

    def get_all_output_name(self) -> list[str]:
        """The names of all outputs."""
        return self._names("get_all_output_name")

    def _named(self, call: str, index: int, count: int) -> str:
        whole(call, "index", index, 0, count - 1)
        name = ctypes.c_char_p()
        library().call(call, self._handle, index, ctypes.byref(name))
        return (name.value or b"").decode()

    def _names(self, call: str) -> list[str]:
        count = ctypes.c_size_t()
        library().call(call, self._handle, ctypes.byref(count), None)
        names = (ctypes.c_char_p * count.value)()
        library().call(call, self._handle, ctypes.byref(count), names)
        return [(name or b"").decode() for name in names]

    # --- sharing

    def share_weights_with(self, src_network: "LiteNetwork") -> None:
        """Be the network that ``src_network`` has loaded, with the same weights (S1-90); both may run at once."""
        _network("share_weights_with", src_network)
        library().call(
            "shared_weight_with_network", self._handle, src_network._handle, said="share_weights_with"
        )
        self._kept.append(src_network._kept)

    def share_runtime_memroy(self, src_network: "LiteNetwork") -> None:
        """Use ``src_network``'s run-time memory, all but weights and graph (S1-91); before ``load``, else LiteError.

        The two may not run at once: ``forward`` raises LiteBusyError. (The name is spelt as documented.)
        """
        call = "share_runtime_memroy"
        _network(call, src_network)
        with self._group.joining(call, src_network._group):
            library().call(call, self._handle, src_network._handle)
        self._kept.append(src_network)  # whose memory it is

    # --- algorithms, measuring, dumps

    def enable_profile_performance(self, profile_file: str | os.PathLike[str]) -> None:
        """Write the time of each op to a JSON file at each run (S1-95)."""
        path = _writable("enable_profile_performance", profile_file)
        library().call("enable_profile_performance", self._handle, path)

    def set_network_algo_workspace_limit(self, size_limit: int) -> None:
        """Choose no algorithm that takes more than so many bytes of workspace (S1-96); after ``load``."""
        call = "set_network_algo_workspace_limit"
        library().call(call, self._handle, whole(call, "size_limit", size_limit, 0, 2**63 - 1))

    def set_network_algo_policy(
        self, policy: int, shared_batch_size: int = 0, binary_equal_between_batch: bool = False
    ) -> None:
        """How algorithms are chosen (S1-97 to S1-99); before ``load``: later the library warns and may keep some.

        policy: LiteAlgoSelectStrategy, members combined by ``|``. shared_batch_size: the batch by which the best is
        chosen, 0 for the model's. binary_equal_between_batch: equal samples of a batch give equal bits.
        """
        call = "set_network_algo_policy"
        if not isinstance(policy, int) or not 0 < policy <= _ALL_STRATEGIES:
            raise LiteArgumentError(
                call=call,
                argument="policy",
                expected="LiteAlgoSelectStrategy combined by |",
                given=repr(policy),
            )
        batch = whole(call, "shared_batch_size", shared_batch_size, 0, 2**32 - 1)
        library().call(call, self._handle, int(policy))
        library().call(
            "set_network_algo_fastrun_config",
            self._handle,
            batch,
            int(binary_equal_between_batch),
            said=call,
        )

    def io_txt_dump(self, txt_file: str | os.PathLike[str]) -> None:
        """Write all inputs and outputs of ops to a text file when it runs (S1-100); after ``load``."""
        library().call(
            "enable_io_txt_dump", self._handle, _writable("io_txt_dump", txt_file), said="io_txt_dump"
        )

    def io_bin_dump(self, bin_dir: str | os.PathLike[str]) -> None:
        """Write them to a folder, a binary file each (S1-101); the folder is made."""
        Path(bin_dir).mkdir(parents=True, exist_ok=True)
        library().call("enable_io_bin_dump", self._handle, os.fsencode(bin_dir), said="io_bin_dump")

    def get_static_memory_alloc_info(self, log_dir: str | os.PathLike[str] = "logs/test") -> None:
        """Write the memory plan to a folder (S1-86). Raises LiteLackError with builds that have it not."""
        library().call("get_static_memory_alloc_info", self._handle, os.fsencode(log_dir))


def _read(path: str | os.PathLike[str] | bytes) -> ctypes.Array[ctypes.c_char]:
    """A model in memory of its own, which the library may read as long as it likes. Raises OSError."""
    if isinstance(path, bytes):
        return (ctypes.c_char * len(path)).from_buffer_copy(path)
    with open(path, "rb") as file:
        memory = (ctypes.c_char * os.fstat(file.fileno()).st_size)()
        if memory and file.readinto(memory) != len(memory):
            raise OSError(f"{path} changed while it was read")
    return memory


def _destroy(*held: Any) -> None:
    """The end of a network; ``held`` are the arguments of ``_destroy_now``."""
    if running_one():  # a thread of the library, which cannot wait for itself
        threading.Thread(target=_destroy_now, args=held).start()
    else:
        _destroy_now(*held)


def _destroy_now(handle: ctypes.c_void_p, kept: Any, group: MemoryGroup, idle: threading.Event) -> None:
    """What the library points to, ``kept``, goes with the arguments, afterwards."""
    idle.wait(_PATIENCE)
    library().call("destroy_network", handle)
    group.end(handle.value or 0)


def _network(call: str, value: Any) -> None:
    if not isinstance(value, LiteNetwork):
        raise LiteArgumentError(
            call=call, argument="src_network", expected="a LiteNetwork", given=repr(value)
        )


def _writable(call: str, path: str | os.PathLike[str]) -> bytes:
    """A file's path for the library, which would write nowhere in silence where the folder is not there."""
    if not Path(path).absolute().parent.is_dir():
        raise LiteArgumentError(
            call=call, argument="path", expected="a file in a folder that is there", given=os.fspath(path)
        )
    return os.fsencode(path)
