"""A network's settings: its device and threads, the choice of algorithms, profiles, and dumps."""

import ctypes
import os

from dlinfer.vendor.megengine.errors import LiteError
from dlinfer.vendor.megengine.lite.binding.checks import folder, whole, writable, wrong
from dlinfer.vendor.megengine.lite.binding.library import library

_ALL_STRATEGIES = 15

_MOST_THREADS = 1024
"""The greatest number of threads of a network. If the system cannot start a thread, the library ends the process."""

_UNRECORDED, _GRAPH_FREED = 0, 2
"""Two values of the option comp_node_seq_record_level. 0: runs are not recorded. 2: the first run frees the graph."""


ASYNCHRONOUS_PROFILE = (
    "only runs that end with wait() have profiles; async_with_callback's callback comes before a "
    "profile is written"
)


class NetworkSettings:
    """The settings of a LiteNetwork, as its base class. LiteNetwork assigns the attributes below."""

    _handle: ctypes.c_void_p
    _record_level: int  # its option comp_node_seq_record_level
    _started: bool  # whether a run has been started
    _asynchronous: bool  # whether ``async_with_callback`` was called
    _profiled: bool  # whether a profile is written

    def _with_graph(self, call: str) -> ctypes.c_void_p:
        """Return the network's handle. Raises LiteError if a run has freed the graph.

        call: the API function that reads the graph, for the error."""
        if self._started and self._record_level == _GRAPH_FREED:
            detail = "comp_node_seq_record_level=2 freed the graph at the first run; make this call before"
            raise LiteError(call=call, detail=detail)
        return self._handle

    # --- devices and threads: before ``load``

    @property
    def device_id(self) -> int:
        """Number of the device that the network runs on. Assigning it raises LiteError after ``load``."""
        return library().ask("get_device_id", self._handle)

    @device_id.setter
    def device_id(self, device_id: int) -> None:
        library().call("set_device_id", self._handle, whole("device_id", "device_id", device_id))

    @property
    def stream_id(self) -> int:
        """Number of the stream that the network runs in. Assigning it raises LiteError after ``load``."""
        return library().ask("get_stream_id", self._handle)

    @stream_id.setter
    def stream_id(self, stream_id: int) -> None:
        library().call("set_stream_id", self._handle, whole("stream_id", "stream_id", stream_id))

    @property
    def threads_number(self) -> int:
        """Number of CPU threads that the network uses. Assigning it raises LiteError after ``load``."""
        return library().ask("get_cpu_threads_number", self._handle)

    @threads_number.setter
    def threads_number(self, nr_threads: int) -> None:
        number = whole("threads_number", "nr_threads", nr_threads, 1, _MOST_THREADS)
        library().call("set_cpu_threads_number", self._handle, number)

    def is_cpu_inplace_mode(self) -> bool:
        """Return whether the network runs only in the thread that calls it."""
        return bool(library().ask("is_cpu_inplace_mode", self._handle))

    def enable_cpu_inplace_mode(self) -> None:
        """Run the network only in the thread that calls it, which is quicker on one core.

        Raises LiteError after ``load``."""
        library().call("set_cpu_inplace_mode", self._handle, said="enable_cpu_inplace_mode")

    def use_tensorrt(self) -> None:
        """Use TensorRT if the device has it. Raises LiteError after ``load``."""
        library().call("use_tensorrt", self._handle)

    # --- algorithms, measuring, dumps

    def enable_profile_performance(self, profile_file: str | os.PathLike[str]) -> None:
        """Write the time of each op to a JSON file at each run.

        Raises LiteError if runs are recorded (comp_node_seq_record_level), since the library does not time recorded
        ops.
        Raises LiteError if runs are asynchronous, since the library would hang."""
        call = "enable_profile_performance"
        if self._record_level != _UNRECORDED:
            detail = "recorded runs (comp_node_seq_record_level) have no profile"
            raise LiteError(call=call, detail=detail)
        if self._asynchronous:
            raise LiteError(call=call, detail=ASYNCHRONOUS_PROFILE)
        library().call(call, self._handle, writable(call, profile_file))
        self._profiled = True

    def set_network_algo_workspace_limit(self, size_limit: int) -> None:
        """Limit the workspace of each algorithm to ``size_limit`` bytes.

        Raises LiteError before ``load`` and after the first run."""
        call = "set_network_algo_workspace_limit"
        limit = whole(call, "size_limit", size_limit, 0, 2**63 - 1)
        library().call(call, self._with_graph(call), limit)

    def set_network_algo_policy(
        self, policy: int, shared_batch_size: int = 0, binary_equal_between_batch: bool = False
    ) -> None:
        """Set how the library chooses an algorithm for each op. Call this before ``load``.

        After ``load`` the library prints a warning, and some ops may keep their algorithms.
        policy: members of LiteAlgoSelectStrategy, combined by ``|``.
        shared_batch_size: the batch size to choose algorithms for; 0 means the model's batch size.
        binary_equal_between_batch: whether equal samples of a batch must give the same result bit for bit."""
        call = "set_network_algo_policy"
        if not isinstance(policy, int) or not 0 < policy <= _ALL_STRATEGIES:
            raise wrong(call, "policy", "LiteAlgoSelectStrategy combined by |", repr(policy))
        batch = whole(call, "shared_batch_size", shared_batch_size, 0, 2**32 - 1)
        handle, equal = self._with_graph(call), int(bool(binary_equal_between_batch))
        library().call(call, handle, int(policy))
        library().call("set_network_algo_fastrun_config", handle, batch, equal, said=call)

    def io_txt_dump(self, txt_file: str | os.PathLike[str]) -> None:
        """Write the inputs and outputs of all ops to one text file at each run. Call this after ``load``."""
        call = "io_txt_dump"
        library().call("enable_io_txt_dump", self._dumped(call), writable(call, txt_file), said=call)

    def io_bin_dump(self, bin_dir: str | os.PathLike[str]) -> None:
        """Write each input and output of all ops to a file in the folder ``bin_dir``, which is created if missing."""
        call = "io_bin_dump"
        library().call("enable_io_bin_dump", self._dumped(call), folder(call, bin_dir), said=call)

    def _dumped(self, call: str) -> ctypes.c_void_p:
        if self._record_level == _GRAPH_FREED:
            detail = "runs without their graph (comp_node_seq_record_level=2) dump nothing"
            raise LiteError(call=call, detail=detail)
        return self._handle

    def get_static_memory_alloc_info(self, log_dir: str | os.PathLike[str] = "logs/test") -> None:
        """Write the plan of the network's memory to files in a folder.

        Raises LiteLackError if this build cannot do it."""
        library().call("get_static_memory_alloc_info", self._handle, os.fsencode(log_dir))
