"""A session: an artifact that was loaded, ready to run by the names of its inputs and outputs.

Any number of threads may call ``run`` and its like at once. Runs happen side by side where the engine can
(``inductor`` does) and no entry writes a weight or a buffer; otherwise, and where io tensors are the session's own or
runtime memory is shared, they happen one after the other. Changing a session (``setup``, ``reset``,
``update_backend_options``, callbacks, sharing) is for one thread while none runs.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import ArtifactInputError, DlinferError, SessionCallError, SessionOptionError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.ir.device import graph_device
from dlinfer.runtime.artifact.files import ReadArtifact, read
from dlinfer.runtime.artifact.loading import Plan, load_stage, plan_of, read_stage
from dlinfer.runtime.options import Flags, SessionOptions
from dlinfer.runtime.session.async_runs import AsyncRuns
from dlinfer.runtime.session.benchmark import BenchmarkResult, benchmark, random_inputs
from dlinfer.runtime.session.dumps import Dumps
from dlinfer.runtime.session.introspection import Introspection
from dlinfer.runtime.session.io_memory import COMMON, IoMemory, RuntimeMemory
from dlinfer.runtime.session.memory_plan import stage_plan, write_plan
from dlinfer.runtime.session.metrics import Metrics, table
from dlinfer.runtime.session.profiles import OpTimes, PythonProfiles, time_ops
from dlinfer.runtime.session.running import (
    RunningStage,
    Values,
    Weights,
    check_target,
    into_own,
    lock_of,
    write_into,
)

__all__ = ["Flags", "Session", "load"]

Callback = Callable[[dict[str, Any]], Any]


def load(
    path_or_bytes: str | Path | bytes | bytearray | memoryview,
    *,
    devices: Sequence[int | str | torch.device] | None = None,
    flags: Flags | int | None = None,
    options: Mapping[str, Any] | str | Path | SessionOptions | None = None,
    key: bytes | str | None = None,
) -> "Session":
    """Open an artifact that ``artifact.save`` wrote, from a file or from its bytes.

    devices: which devices to run on, by torch's name or index; the artifact's own where none are given.
    flags: ``Flags.SHARE_MEM`` lets sessions run in the same memory, one at a time.
    options: SessionOptions as a dict, or a YAML file of them. key: for an encrypted artifact, its 32 bytes or the
        name of a registered decryption.

    The file is checked as a whole here; weights are mapped and graphs lowered by ``setup`` or the first run. Weights
    lie where the file does: in its mapping, or in the bytes, which must not change then.
    Raises ArtifactError (what is wrong with the file, by its subclass), SessionOptionError.
    """
    return Session(read(path_or_bytes, key=key), SessionOptions.of(options), devices, flags)


class Session(Introspection):
    """A loaded artifact, ready to run. ``dlinfer.load`` makes it; as a context manager it resets itself at the end."""

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
        self._plans = {
            entry: [plan_of(artifact, stage) for stage in stages] for entry, stages in artifact.stages.items()
        }
        self.devices = _devices(devices, self._plans)
        flags = Flags(flags or 0)
        self._shared_memory = Flags.SHARE_MEM in flags
        self._memory = COMMON if self._shared_memory else RuntimeMemory()
        self._tensors = artifact.tensors
        self._running: dict[str, list[RunningStage]] = {}
        self._io: IoMemory | None = None
        self._setting_up = threading.Lock()
        self._async = AsyncRuns()
        self._dumps = Dumps()
        self._profiles = PythonProfiles()
        self._start: Callback | None = None
        self._finish: Callback | None = None

    # --- life

    @property
    def is_set_up(self) -> bool:
        """Whether it is ready to run."""
        return bool(self._running)

    def setup(self) -> None:
        """Map the weights and lower the graphs; otherwise the first run does it.

        Raises ArtifactCorruptError where a graph is not sound, or the file was written into after it was loaded, and
        what finding and running the engine raises.
        """
        with self._setting_up:
            if self._running:
                return
            containers = [self._artifact.container]
            if self._tensors.container is not containers[0]:  # of the session that shares its weights
                containers.append(self._tensors.container)
            for container in containers:
                container.check_unchanged()  # reading behind the end of a file that was cut ends the process
            loaded = {
                entry: [
                    load_stage(self._artifact, stage, plan, self.options)
                    for stage, plan in zip(stages, self._plans[entry], strict=True)
                ]
                for entry, stages in self._artifact.stages.items()
            }
            for container in containers:
                container.check_contents()
            every = [stage for stages in loaded.values() for stage in stages]
            written = frozenset(number for stage in every for number in stage.written)
            weights = Weights(self._tensors, written)
            running = {
                entry: [RunningStage(stage, weights.of(stage)) for stage in stages]
                for entry, stages in loaded.items()
            }
            self._relock(running)
            self._running = running  # last: from here on other threads run it

    def _relock(self, running: Mapping[str, Sequence[RunningStage]]) -> None:
        """Decide anew whether runs are kept apart."""
        every = [stage for stages in running.values() for stage in stages]
        lock = lock_of(
            [stage.loaded for stage in every],
            self._memory,
            shared=self._shared_memory,
            owned=self.options.io == "owned",
        )
        for stage in every:
            stage.lock = lock

    def reset(self) -> None:
        """Release all that ``setup`` took: weights, buffers, what the engine compiled, io tensors.

        The next run sets the session up anew, with buffers as they were saved.
        """
        self.wait()
        with self._setting_up:
            self._running, self._io = {}, None
            if not self._shared_memory:
                self._memory.release()

    def close(self) -> None:
        """Reset it and end its thread of asynchronous runs."""
        self.reset()
        self._async.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # --- options

    def backend_options(self) -> dict[str, Any]:
        """Return the options that may be changed now, with their values."""
        names = self.options.AFTER_SETUP if self.is_set_up else self.options.names()
        return {name: getattr(self.options, name) for name in names}

    def update_backend_options(self, **changes: Any) -> None:
        """Change options. Raises SessionOptionError for one that takes ``reset`` first."""
        late = [
            name for name in changes if name in self.options.names() and name not in self.backend_options()
        ]
        if late:
            expected = "no change after setup(): call reset() first"
            raise SessionOptionError(option=late[0], given=changes[late[0]], expected=expected)
        self.options = self.options.changed(changes)
        self._relock(self._running)

    def share_weights_with(self, other: "Session") -> None:
        """Use the weights of another session of the same artifact, where they lie. Both may run at once.

        What the graphs write (caches) stays each session's own. Raises SessionCallError after ``setup`` and for
        another artifact.
        """
        self._need_fresh("share_weights_with")
        mine, others = self._tensors, other._tensors
        if (mine.digest, mine.layouts) != (others.digest, others.layouts):
            detail = "the other session's weights are not these"
            raise SessionCallError(what="weights to share with", name=other._artifact.source, detail=detail)
        self._tensors = others

    def share_runtime_memory_with(self, other: "Session") -> None:
        """Run in the memory of another session, one of the two at a time.

        Its own tensors for inputs and outputs then lie where the other's lie. Not to be called while the other runs.
        Raises SessionCallError after ``setup``.
        """
        self._need_fresh("share_runtime_memory_with")
        self._memory = other._memory
        self._shared_memory = other._shared_memory = True
        other._relock(other._running)

    def _need_fresh(self, what: str) -> None:
        if self.is_set_up:
            raise SessionCallError(
                what="way to call", name=what, detail="it is set up already; reset() it first"
            )

    # --- running

    def run(
        self,
        inputs: Mapping[str, Any],
        entry: str | None = None,
        *,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run an entry by the names of its inputs.

        inputs: a torch tensor or numpy array for each, taken where it lies; an input that the graph writes (a cache
            that is passed in) is written in place. outputs: tensors or arrays that results are put into.
        entry: may be left out where there is only one.

        Returns name -> result, numpy arrays where all inputs are, else tensors; those of ``outputs`` where given. A
        number that the module gives is there as it is; None is left out.
        With ``io="owned"`` results lie in the session's own tensors, until the next run.
        Raises SessionCallError for names it does not have, ArtifactInputError for values that do not fit, and
        GraphRunError where the graph fails.
        """
        running, number, name = self._chosen(entry, inputs)
        values = Values(running, inputs)
        if outputs:
            ports = {port.name: port for port in running.interface.outputs}
            for target in outputs:
                if target not in ports:
                    raise SessionCallError(what="output", name=target, detail=f"it gives {', '.join(ports)}")
                check_target(ports[target], outputs[target], values.symbols)
        if self._start is not None:
            self._start(dict(inputs))
        owned = self.options.io == "owned"
        # Results in the session's own tensors hold until the next run: it waits until they are handed out.
        with self._memory.lock if owned else contextlib.nullcontext():
            with self._profiles.of_run(self.options.enable_profiling):
                start = time.perf_counter()
                results = running.results(values.bound)
                tensors = self._placed(name, number, running, running.tensors(results))
                seconds = time.perf_counter() - start
            found = running.whole(_handed_out(running, values, tensors, outputs or {}), results)
        if self.options.enable_metrics:
            self.metrics.record(seconds)
        self._dumps.write(name, inputs, found)
        if self._finish is not None:
            self._finish(found)
        return found

    def _placed(
        self, entry: str, number: int, running: RunningStage, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        """A run's outputs, in the session's own tensors where it has such."""
        if self.options.io != "owned":
            return tensors
        return into_own(self._io_tensors(entry, number), running.interface.outputs, tensors)

    def _chosen(self, entry: str | None, inputs: Mapping[str, Any]) -> tuple[RunningStage, int, str]:
        """The stage of an entry that takes these inputs; the last one where none does."""
        if not self._running:
            self.setup()
        name = self._entry(entry)
        stages = self._running[name]
        for number, running in enumerate(stages[:-1]):
            try:
                Values(running, inputs)
            except ArtifactInputError:
                continue
            return running, number, name
        return stages[-1], len(stages) - 1, name

    def process(
        self, entry: str, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor]
    ) -> int:
        """Run an entry by the indexes of inputs and outputs, all given by the caller.

        Returns 0, or 1 where it failed: then ``last_error`` says why.
        """
        try:
            signature = self.signature(entry)
            named = {_of(signature.inputs, index, "input"): value for index, value in inputs.items()}
            into = {_of(signature.outputs, index, "output"): value for index, value in outputs.items()}
            self.run(named, entry, outputs=into)
        except DlinferError as error:
            self.last_error = error
            return 1
        self.last_error = None
        return 0

    # --- asynchronous runs and callbacks

    def set_start_callback(self, callback: Callback | None) -> None:
        """Set what is called with the inputs before each run; where it raises, the run does not start."""
        self._start = callback

    def set_finish_callback(self, callback: Callback | None) -> None:
        """Set what is called with the outputs after each run."""
        self._finish = callback

    def run_async(
        self,
        inputs: Mapping[str, Any],
        entry: str | None = None,
        *,
        outputs: Mapping[str, Any] | None = None,
        callback: Callback | None = None,
    ) -> Any:
        """Queue a run after those that were asked for before, and return a Future of its outputs at once.

        callback: called with the outputs when it is done, before the next run starts.
        Inputs must not change until then. ``wait`` waits for all.
        """

        def job() -> dict[str, Any]:
            results = self.run(inputs, entry, outputs=outputs)
            if callback is not None:
                callback(results)
            return results

        return self._async.submit(job)

    def wait(self) -> None:
        """Wait until all asynchronous runs are done. Raises the first error that one of them ended with."""
        self._async.wait()

    # --- measuring

    def get_metrics(self) -> dict[str, float]:
        """Return how many runs there were and how long they took, in seconds."""
        return self.metrics.summary()

    def print_metrics(self) -> None:
        """Print the metrics. Raises SessionCallError where they are off."""
        if not self.options.enable_metrics:
            detail = "load it with enable_metrics=True, or update_backend_options(enable_metrics=True)"
            raise SessionCallError(what="values of", name="metrics", detail=detail)
        print(table(self.get_metrics()))

    def run_benchmark(
        self,
        num_inferences: int | None = None,
        inf_time: float | None = None,
        input_dict: Mapping[str, Any] | None = None,
        entry: str | None = None,
    ) -> BenchmarkResult:
        """Run repeatedly with the same inputs, which are checked once.

        num_inferences: how many runs, 40 by default; or inf_time: for how many seconds. Not both.
        input_dict: the inputs, random ones where none are given.
        Returns (inf_completed, inf_rate in runs a second, inf_time in seconds, batch_size).
        """
        if not self._running:
            self.setup()
        given = input_dict
        if given is None:
            given = random_inputs(self._running[self._entry(entry)][0].interface)
        running, _, _ = self._chosen(entry, given)
        result, latencies = benchmark(running, Values(running, given).bound, num_inferences, inf_time)
        if self.options.enable_metrics:
            for seconds in latencies:
                self.metrics.record(seconds)
        return result

    def print_profile_data(self, n: int = 1) -> None:
        """Print where the Python of the first ``n`` runs spent its time. Raises SessionCallError where
        profiling is off or no run was profiled."""
        if not self.options.enable_profiling or not self._profiles.tables:
            detail = "load it with enable_profiling=True and run it first"
            raise SessionCallError(what="profile of", name="runs", detail=detail)
        print(self._profiles.text(n))

    def profile_ops(
        self, inputs: Mapping[str, Any], entry: str | None = None, path: str | Path | None = None
    ) -> list[OpTimes]:
        """Run once and time every op: rows in running order; ``path`` also gets them as JSON."""
        running, _, _ = self._chosen(entry, inputs)
        return time_ops(running, Values(running, inputs).bound, path)

    # --- dumps

    def io_txt_dump(self, path: str | Path | None) -> None:
        """Append all inputs and outputs of each run from now on to a text file; None ends it."""
        self._dumps.text = None if path is None else Path(path)

    def io_bin_dump(self, folder: str | Path | None) -> None:
        """Write all inputs and outputs of each run from now on as .npy files; None ends it."""
        self._dumps.folder = None if folder is None else Path(folder)

    def get_static_memory_alloc_info(self, log_dir: str | Path = "logs/test") -> Path:
        """Write what memory each entry needs, and when, as JSON into a folder; gives the file."""
        plans: dict[str, Any] = {"runtime_memory_bytes": self._memory.nbytes, "entries": {}}
        for entry, stages in self._artifact.stages.items():
            found = plans["entries"].setdefault(entry, [])
            for stage, plan in zip(stages, self._plans[entry], strict=True):
                read = read_stage(self._artifact, stage, self.options)
                found.append(stage_plan(read, plan.interface, self._artifact.layouts(stage)))
        return write_plan(plans, Path(log_dir))


def _handed_out(
    running: RunningStage, values: Values, results: Sequence[torch.Tensor], outputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Each result by its name: in the caller's memory where that was given, else as it is."""
    found: dict[str, Any] = {}
    for port, result in zip(running.interface.outputs, results, strict=True):
        if port.name in outputs:
            write_into(port, outputs[port.name], result)
            found[port.name] = outputs[port.name]
        else:
            found[port.name] = values.result(port, result)
    return found


def _of(ports: Sequence[Any], index: int, what: str) -> str:
    if type(index) is not int or not 0 <= index < len(ports):
        raise SessionCallError(what=what, name=index, detail=f"it has {len(ports)}")
    return ports[index].name


def _devices(
    given: Sequence[int | str | torch.device] | None, plans: Mapping[str, Sequence[Plan]]
) -> list[torch.device]:
    """The devices that are asked for. Raises SessionOptionError where the artifact was not made for them."""
    made_for = dict.fromkeys(
        port.device for stages in plans.values() for plan in stages for port in _ports(plan.interface)
    ) or {graph_device(()): None}
    if given is None:
        return list(made_for)
    kind = next(iter(made_for)).type
    wanted = [torch.device(kind, one) if isinstance(one, int) else torch.device(one) for one in given]
    if not wanted or set(map(_first, wanted)) != set(map(_first, made_for)):
        expected = f"the devices it was made for: {', '.join(map(str, made_for))}"
        raise SessionOptionError(option="devices", given=list(given), expected=expected)
    return list(made_for)


def _first(device: torch.device) -> tuple[str, int]:
    """Kind and index of a device; without an index the first is meant."""
    return device.type, device.index or 0


def _ports(interface: Interface) -> Sequence[Any]:
    return (*interface.inputs, *interface.outputs)
