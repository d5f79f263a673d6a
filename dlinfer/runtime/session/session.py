"""A session: a loaded artifact, ready to run by the names of its inputs and outputs.

Any number of threads may call ``run`` and similar methods at once. Runs happen at the same time if all of these hold:

- The engine supports it, as ``inductor`` does.
- No entry writes a weight or a buffer.
- The option ``io`` is ``caller``.
- No other session shares the memory for inputs and outputs.

Otherwise runs happen one after the other. Only while no run is in progress may a thread change the session, by
``setup``, ``reset``, ``update_backend_options``, callbacks or sharing.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from dlinfer.errors import ArtifactInputError, DlinferError, SessionCallError, SessionOptionError
from dlinfer.graph.ir.device import graph_device
from dlinfer.runtime.artifact.files import ReadArtifact, read
from dlinfer.runtime.artifact.loading import LoadedStage, load_stage, read_stage
from dlinfer.runtime.options import Flags, SessionOptions
from dlinfer.runtime.session.async_runs import AsyncRuns, Run
from dlinfer.runtime.session.benchmark import BenchmarkResult, benchmark, random_inputs
from dlinfer.runtime.session.dumps import Dumps
from dlinfer.runtime.session.introspection import Introspection
from dlinfer.runtime.session.io_memory import COMMON, IoMemory, RuntimeMemory
from dlinfer.runtime.session.memory_plan import memory_plan
from dlinfer.runtime.session.metrics import Metrics, table
from dlinfer.runtime.session.profiles import OpTimes, PythonProfiles, time_ops
from dlinfer.runtime.session.running import Results, Values, check_outputs

__all__ = ["Flags", "Session", "load"]

Callback = Callable[[Results], object]


def load(
    path_or_bytes: str | Path | bytes | bytearray | memoryview,
    *,
    devices: Sequence[int | str | torch.device] | None = None,
    flags: Flags | int | None = None,
    options: Mapping[str, object] | str | Path | SessionOptions | None = None,
    key: bytes | str | None = None,
) -> "Session":
    """Open an artifact that ``artifact.save`` wrote, from a file or from its bytes.

    devices: the devices to run on, by torch's name or index. They must be the devices that the artifact was compiled
        for, which are also the default.
    flags: with ``Flags.SHARE_MEM``, sessions use the same memory for inputs and outputs, one at a time.
    options: SessionOptions as a dict, or a YAML file of them.
    key: for an encrypted artifact, its 32 bytes or the name of a registered decryption.

    ``load`` checks the whole file. ``setup`` or the first run maps weights and compiles graphs. Weights on the CPU are
    not copied: they use the mapped file or the passed bytes, which must not change.

    Raises SessionOptionError. Raises ArtifactError; its subclasses name the fault of the file.
    """
    return Session(read(path_or_bytes, key=key), SessionOptions.of(options), devices, flags)


class Session(Introspection):
    """A loaded artifact, ready to run. ``dlinfer.load`` returns it. A ``with`` block closes the session at its end."""

    def __init__(
        self,
        artifact: ReadArtifact,
        options: SessionOptions,
        devices: Sequence[int | str | torch.device] | None = None,
        flags: Flags | int | None = None,
    ) -> None:
        self.options = options
        self.metrics = Metrics()
        self.last_error: DlinferError | None = None
        self._artifact = artifact
        self._signatures = {
            entry: [stage.interface for stage in stages] for entry, stages in artifact.stages.items()
        }
        self.devices = self._devices(devices)
        self._shared_memory = Flags.SHARE_MEM in Flags(flags or 0)
        self._memory = COMMON if self._shared_memory else RuntimeMemory()
        self._tensors = artifact.tensors
        self._running: dict[str, list[LoadedStage]] = {}
        self._io: IoMemory | None = None
        self._setting_up = threading.Lock()
        self._async = AsyncRuns()
        self._dumps = Dumps()
        self._profiles = PythonProfiles()
        self._start: Callback | None = None
        self._finish: Callback | None = None

    def _devices(self, devices: Sequence[int | str | torch.device] | None) -> list[torch.device]:
        interfaces = [interface for stages in self._signatures.values() for interface in stages]
        ports = [port for interface in interfaces for port in (*interface.inputs, *interface.outputs)]
        own = list(dict.fromkeys(port.device for port in ports)) or [graph_device(())]
        if devices is not None:
            kind = own[0].type
            asked = [
                torch.device(kind, device) if isinstance(device, int) else torch.device(device)
                for device in devices
            ]
            if set(map(_kind_and_index, asked)) != set(map(_kind_and_index, own)):
                expected = f"the devices that it was compiled for: {', '.join(map(str, own))}"
                raise SessionOptionError(option="devices", given=list(devices), expected=expected)
        return own

    # --- life

    @property
    def is_set_up(self) -> bool:
        """Whether the graphs are compiled and the weights mapped."""
        return bool(self._running)

    def setup(self) -> None:
        """Map the weights and compile the graphs. Without this call, the first run does both.

        Raises ArtifactCorruptError if a graph is malformed, or if the file was written into after ``load``. Also raises
        the errors of an engine that is missing or cannot compile the graph.
        """
        with self._setting_up:
            if self._running:
                return
            # This session's file, and the file of the session whose weights it uses.
            containers = {
                id(tensors): tensors.container for tensors in (self._artifact.tensors, self._tensors)
            }
            for container in containers.values():
                container.check_unchanged()  # a read beyond a truncated file kills the process
            running = {
                entry: [load_stage(self._artifact, stage, self.options) for stage in stages]
                for entry, stages in self._artifact.stages.items()
            }
            for container in containers.values():
                container.check_unchanged(contents=True)
            loaded = [stage for stages in running.values() for stage in stages]
            # If a stage writes to memory, all stages share one copy of that memory: another may read a row of it.
            copies = self._tensors.copies({number for stage in loaded for number in stage.written})
            for stage in loaded:
                stage.weights = tuple(
                    copies[number] if number in copies else self._tensors.tensor(number)
                    for number in stage.numbers
                )
            self._relock(loaded)
            self._running = running  # last: from here on other threads run the stages

    def _relock(self, stages: Iterable[LoadedStage] | None = None) -> None:
        """Give all stages the same lock, unless runs may happen at the same time.

        The module's docstring says when they may.

        stages: stages that are not yet in the session; None means the session's own.
        """
        running = [stage for several in self._running.values() for stage in several]
        loaded = running if stages is None else list(stages)
        concurrent = all(stage.run.engine.concurrent and not stage.written for stage in loaded)
        alone = self._shared_memory or self.options.io == "owned" or not concurrent
        for stage in loaded:
            stage.lock = self._memory.lock if alone else contextlib.nullcontext()

    def reset(self) -> None:
        """Release all that ``setup`` allocated: weights, buffers, compiled graphs, input and output tensors.

        The next run sets the session up again. Buffers, such as KV caches, then have the values stored in the file.
        """
        self.wait()
        with self._setting_up:
            self._running, self._io = {}, None
            if not self._shared_memory:
                self._memory.release()

    def close(self) -> None:
        """Reset the session and end its thread for asynchronous runs."""
        self.reset()
        self._async.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- options

    def backend_options(self) -> dict[str, object]:
        """Return the options that may change now, with their values."""
        names = self.options.AFTER_SETUP if self.is_set_up else self.options.names()
        return {name: getattr(self.options, name) for name in names}

    def update_backend_options(self, **changes: object) -> None:
        """Change options. Raises SessionOptionError for an option that needs ``reset`` before a change."""
        for name, value in changes.items():
            if name in self.options.names() and name not in self.backend_options():
                expected = "no change after setup(): call reset() first"
                raise SessionOptionError(option=name, given=value, expected=expected)
        self.options = self.options.changed(changes)
        self._relock()

    def share_weights_with(self, other: "Session") -> None:
        """Use the weights of another session of the same artifact, without a copy.

        Both sessions may run at the same time.

        Buffers that graphs write, such as caches, are not shared: each session has its own copy. Raises
        SessionCallError after ``setup``, or if the other session's weights differ.
        """
        self._need_fresh("share_weights_with")
        mine, others = self._tensors, other._tensors
        if (mine.digest, mine.layouts) != (others.digest, others.layouts):
            detail = "the other session has other weights"
            raise SessionCallError(what="weights to share with", name=other._artifact.source, detail=detail)
        self._tensors = others

    def share_runtime_memory_with(self, other: "Session") -> None:
        """Use another session's memory for input and output tensors.

        From then on, only one of the two sessions runs at a time.

        Do not call this method while ``other`` runs. Raises SessionCallError after ``setup``.
        """
        self._need_fresh("share_runtime_memory_with")
        self._memory = other._memory
        self._shared_memory = other._shared_memory = True
        other._relock()

    def _need_fresh(self, what: str) -> None:
        if self.is_set_up:
            detail = "the session is set up already; call reset() first"
            raise SessionCallError(what="call", name=what, detail=detail)

    # --- running

    def run(
        self,
        inputs: Mapping[str, object],
        entry: str | None = None,
        *,
        outputs: Mapping[str, object] | None = None,
    ) -> Results:
        """Run an entry, with inputs and results by name.

        inputs: name -> torch tensor or numpy array. It is used without a copy where possible. If the graph changes an
            input, such as a KV cache, it writes into the caller's tensor.
        entry: may be omitted if the artifact has only one.
        outputs: name -> tensor or array to copy a result into.

        Returns name -> result. A result named in ``outputs`` is the caller's tensor or array. The other results are
        numpy arrays if all inputs are numpy arrays or numbers, else tensors. Numbers and texts stay as they are.
        Results that are None are omitted. With ``io="owned"``, results are the session's own tensors, which the next
        run overwrites.

        Raises SessionCallError for unknown names, ArtifactInputError for values that the graph does not accept, and
        GraphRunError if the graph fails.
        """
        name = self._entry(entry)
        number, stage, values = self._bound(name, inputs)
        if outputs:
            check_outputs(stage.interface, outputs, values.symbols)
        own = self._own_memory if self.options.io == "owned" else None
        if own is not None:
            for _, port in stage.results:
                if port is not None:  # refuse a size without a limit before the run writes a cache
                    own.bytes_of(name, number, "outputs", port)
        if self._start is not None:
            self._start(dict(inputs))
        # The next run overwrites results in the session's own tensors, so the next run waits until they are returned.
        with self._memory.lock if own is not None else contextlib.nullcontext():
            with self._profiles.of_run(self.options.enable_profiling):
                start = time.perf_counter()
                results = stage(values.bound)
                if own is not None:
                    results = [
                        own.tensor(name, number, "outputs", port, result.shape).copy_(result)
                        if port is not None and isinstance(result, torch.Tensor)
                        else result
                        for (_, port), result in zip(stage.results, results, strict=True)
                    ]
                seconds = time.perf_counter() - start
            named = values.named(stage, results, outputs or {})
        if self.options.enable_metrics:
            self.metrics.record(seconds)
        self._dumps.write(name, inputs, named)
        if self._finish is not None:
            self._finish(named)
        return named

    def _bound(self, entry: str, inputs: Mapping[str, object]) -> tuple[int, LoadedStage, Values]:
        """Return the first stage that accepts the inputs, as (index of the stage, the stage, the inputs bound to it).

        If no stage accepts the inputs, the error of the last stage is raised.
        """
        if not self._running:
            self.setup()
        stages = self._running[entry]
        for number, stage in enumerate(stages[:-1]):
            with contextlib.suppress(ArtifactInputError):
                return number, stage, Values(stage.interface, inputs)
        return len(stages) - 1, stages[-1], Values(stages[-1].interface, inputs)

    def process(
        self, entry: str, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor]
    ) -> int:
        """Run an entry, with inputs and outputs by index.

        inputs, outputs: index -> the caller's tensor, for every input and output.

        Returns 0, or 1 if the run failed. ``last_error`` then holds the error.
        """
        self.last_error = None
        try:
            named = {self._port(entry, index, "inputs").name: value for index, value in inputs.items()}
            into = {self._port(entry, index, "outputs").name: value for index, value in outputs.items()}
            self.run(named, entry, outputs=into)
        except DlinferError as error:
            self.last_error = error
        return int(self.last_error is not None)

    # --- asynchronous runs and callbacks

    def set_start_callback(self, callback: Callback | None) -> None:
        """Set a function that gets the inputs before each run. If the function raises, the run does not start."""
        self._start = callback

    def set_finish_callback(self, callback: Callback | None) -> None:
        """Set a function that gets the outputs after each run."""
        self._finish = callback

    def run_async(
        self,
        inputs: Mapping[str, object],
        entry: str | None = None,
        *,
        outputs: Mapping[str, object] | None = None,
        callback: Callback | None = None,
    ) -> Run:
        """Queue a run, and return a Future of its results at once. Queued runs happen one after the other.

        callback: gets the results after this run, before the next queued run starts.
        Inputs must not change until the run is done. ``wait`` waits for all queued runs.
        """

        def job() -> Results:
            results = self.run(inputs, entry, outputs=outputs)
            if callback is not None:
                callback(results)
            return results

        return self._async.submit(job)

    def wait(self) -> None:
        """Wait until all asynchronous runs are done. If runs failed, raise the first error."""
        self._async.wait()

    # --- measuring

    def get_metrics(self) -> dict[str, float]:
        """Return the number of runs, and their latencies in seconds."""
        return self.metrics.summary()

    def print_metrics(self) -> None:
        """Print the metrics. Raises SessionCallError if the option ``enable_metrics`` is off."""
        if not self.options.enable_metrics:
            detail = (
                "the option enable_metrics is off; load the artifact with enable_metrics=True, or call "
                "update_backend_options(enable_metrics=True)"
            )
            raise SessionCallError(what="call", name="print_metrics", detail=detail)
        print(table(self.get_metrics()))

    def run_benchmark(
        self,
        num_inferences: int | None = None,
        inf_time: float | None = None,
        input_dict: Mapping[str, object] | None = None,
        entry: str | None = None,
    ) -> BenchmarkResult:
        """Run an entry repeatedly with the same inputs, which are checked once.

        num_inferences: how many runs, by default 40. inf_time: for how many seconds. Pass only one of the two.
        input_dict: the inputs. By default they are random.

        Returns (inf_completed, inf_rate in runs per second, inf_time in seconds, batch_size).
        """
        name = self._entry(entry)
        inputs = random_inputs(self.signature(name)) if input_dict is None else input_dict
        _, stage, values = self._bound(name, inputs)
        result, latencies = benchmark(stage, values.bound, num_inferences, inf_time)
        if self.options.enable_metrics:
            for seconds in latencies:
                self.metrics.record(seconds)
        return result

    def print_profile_data(self, n: int = 1) -> None:
        """Print the Python profiles of the first ``n`` runs. Raises SessionCallError if no run was profiled."""
        if not self.options.enable_profiling or not self._profiles.tables:
            detail = "no run was profiled; load the artifact with enable_profiling=True and run it first"
            raise SessionCallError(what="call", name="print_profile_data", detail=detail)
        print(self._profiles.text(n))

    def profile_ops(
        self, inputs: Mapping[str, object], entry: str | None = None, path: str | Path | None = None
    ) -> list[OpTimes]:
        """Run once and return the time of every step, in the order of the run.

        A step is an op, or a region that its engine compiled as a whole. path: a file to write the times to, as JSON.
        """
        _, stage, values = self._bound(self._entry(entry), inputs)
        return time_ops(stage, values.bound, path)

    # --- dumps

    def io_txt_dump(self, path: str | Path | None) -> None:
        """Append all inputs and outputs of each later run to a text file; None ends the dump."""
        self._dumps.text = None if path is None else Path(path)

    def io_bin_dump(self, folder: str | Path | None) -> None:
        """Write all inputs and outputs of each later run as .npy files into ``folder``; None ends the dump."""
        self._dumps.folder = None if folder is None else Path(folder)

    def get_static_memory_alloc_info(self, log_dir: str | Path = "logs/test") -> Path:
        """Write the memory plans of all stages to a JSON file in ``log_dir``, and return the file's path.

        See ``memory_plan``.
        """
        artifact = self._artifact
        entries = {
            entry: [
                memory_plan(
                    read_stage(artifact, stage, self.options), stage.interface, artifact.layouts(stage)
                )
                for stage in stages
            ]
            for entry, stages in artifact.stages.items()
        }
        plans = {"runtime_memory_bytes": self._memory.nbytes, "entries": entries}
        path = Path(log_dir) / "memory_plan.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plans, indent=1))
        return path


def _kind_and_index(device: torch.device) -> tuple[str, int]:
    """Return the device's type and index. A device without an index has index 0."""
    return device.type, device.index or 0
