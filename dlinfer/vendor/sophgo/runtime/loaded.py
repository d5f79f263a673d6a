"""A bmodel that is loaded on one or more devices, and runs its networks on memory of these devices."""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from dlinfer.vendor.sophgo.errors import (
    SophgoCallError,
    SophgoModelError,
    SophgoRuntimeError,
    SophgoUnavailableError,
)
from dlinfer.vendor.sophgo.runtime import bmodel, chips
from dlinfer.vendor.sophgo.runtime.device import DeviceMemory, Place, number_of, open_device
from dlinfer.vendor.sophgo.runtime.worker import Worker, memory_file

# Kind of refusal -> advice, if compiling again does not help.
_ADVICE = {"order": "load this bmodel before that network, or compile that network for another addr_mode"}


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a network.

    dtype: a bm_data_type_t.
    max_bytes: its size in bytes in the largest stage.
    device: the caller's number of the device that has it.
    shapes: its shape in each stage.
    places: in each stage, BMRuntime's own memory for it. ``LoadedModel.memory`` returns it."""

    name: str
    dtype: int
    scale: float
    max_bytes: int
    device: int
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[Place, ...]


@dataclass(frozen=True)
class NetworkInfo:
    """A network of a bmodel.

    is_dynamic: whether it takes smaller sizes than those of its stages.
    addr_mode: how the compiler placed inputs and outputs in memory: 0 basic, 1 io_alone, 2 io_tag, 3 io_tag_fuse, 4
        io_reloc.
    stage_num: the number of stages. A stage is a set of shapes that the network was compiled for."""

    name: str
    is_dynamic: bool
    addr_mode: int
    stage_num: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class Argument:
    """A tensor that a run of a network reads or writes. dtype: a bm_data_type_t."""

    dtype: int
    shape: tuple[int, ...]
    memory: DeviceMemory

    def wire(self) -> list[Any]:
        """Return the tensor as the list that the worker's call ``run`` takes."""
        place = self.memory.place
        return [self.dtype, list(self.shape), place.number, place.offset, place.size]


class LoadedModel:
    """A bmodel from a file or from bytes. It is unloaded when nothing refers to it any more.

    devices: the numbers of the devices to use. A bmodel that was compiled for several devices needs as many.
    flags: bits of bm_runtime_flag_t; None leaves BMRuntime's own flags.
    Raises SophgoModelError for a damaged bmodel, for one that needs another chip or more devices, and if BMRuntime
    refuses the bmodel.
    Raises the errors of ``open_device``."""

    def __init__(
        self, source: str | os.PathLike[str] | bytes, devices: Sequence[int], flags: int | None
    ) -> None:
        devices = [number_of(device) for device in devices]
        if not devices or len(set(devices)) != len(devices):
            raise SophgoCallError(
                call="load", detail=f"devices {devices} must be one or more different numbers"
            )
        in_memory = isinstance(source, bytes)
        header = bmodel.read_bytes(source) if in_memory else bmodel.read_file(Path(source))
        self.source = "in memory" if in_memory else os.fspath(source)
        self.chip = chips.of_bmodel(header.chip)
        if header.devices > len(devices):
            detail = f"it needs {header.devices} devices, but {len(devices)} were passed"
            raise self._refused(detail, "pass as many devices")
        self.devices = {number: open_device(number, self.chip) for number in devices}
        self._check_chip()
        self._worker = self.devices[devices[0]].worker
        kind = chips.KINDS.get(self.chip)
        working = sorted(header.working()) if kind is not None and kind.sharing else []
        if self._worker.without_shim and (header.devices > 1 or working):
            several = f"as {header.devices} devices" if header.devices > 1 else ""
            what = f"{self._worker.name} {several or 'with networks that need working memory'}"
            raise SophgoUnavailableError(
                what=what, reason=self._worker.without_shim, advice="install a C compiler"
            )
        weights = sorted(header.weights)
        answer = self._load(source, devices=devices, flags=flags, working=working, weights=weights)
        self._number: int = answer["number"]
        weakref.finalize(self, self._worker.discard, "unload", self._number).atexit = False
        self.flags: int = answer["flags"]
        self.networks = {each["name"]: self._network(each) for each in answer["networks"]}

    def _check_chip(self) -> None:
        for device in self.devices.values():
            if device.chip != self.chip:
                detail = f"it was compiled for {self.chip}, but device {device.number} is {device.chip}"
                advice = f"compile the model for {device.chip}, or leave DLINFER_SOPHGO_EMULATE empty"
                raise self._refused(detail, advice)

    def _load(self, source: Any, **arguments: Any) -> dict[str, Any]:
        try:
            if not isinstance(source, bytes):
                path = str(Path(source).absolute())
                return self._worker.call("load", **arguments, path=path, size=0)
            with self._in_memory(source) as file:
                return self._worker.call("load", file.fileno(), **arguments, path=None, size=len(source))
        except SophgoRuntimeError as error:
            advice = _ADVICE.get(error.fields["kind"], "compile it again")
            raise self._refused(error.fields["detail"], advice) from None

    def _in_memory(self, data: bytes) -> FileIO:
        try:
            file, view = memory_file(), memoryview(data)
            while view:  # a write takes at most 2 GiB
                view = view[file.write(view) :]
        except OSError as error:
            raise self._refused(f"it cannot be sent to the worker: {error}", "open it from a file") from None
        return file

    def _refused(self, detail: str, advice: str) -> SophgoModelError:
        return SophgoModelError(source=self.source, detail=detail, advice=advice)

    def _network(self, answer: dict[str, Any]) -> NetworkInfo:
        sides = {side: tuple(map(self._tensor, answer[side])) for side in ("inputs", "outputs")}
        return NetworkInfo(**{**answer, **sides})

    @staticmethod
    def _tensor(answer: dict[str, Any]) -> TensorInfo:
        shapes = tuple(map(tuple, answer.pop("shapes")))
        places = tuple(Place(each["number"], 0, each["size"]) for each in answer.pop("memories"))
        return TensorInfo(**answer, shapes=shapes, places=places)

    def memory(self, tensor: TensorInfo, stage: int) -> DeviceMemory:
        """Return BMRuntime's own memory for an input or output in a stage. The result keeps the model alive."""
        return DeviceMemory(self.devices[tensor.device], tensor.places[stage], self)

    def run(
        self, network: str, inputs: Sequence[Argument], outputs: Sequence[Argument]
    ) -> list[tuple[int, ...]]:
        """Run a network, wait until it has finished, and return the shapes of its outputs.

        The network reads the memory of ``inputs`` and writes the memory of ``outputs``. This method checks only that
        all memory is in this model's worker. BMRuntime refuses other bad arguments, or crashes the worker.
        Raises SophgoCallError for memory in another worker.
        Raises the errors of a worker."""
        for side, arguments in (("input", inputs), ("output", outputs)):
            for index, argument in enumerate(arguments):
                self._check_worker(f"{side} {index} of {network!r}", argument.memory.device.worker)
        sources, targets = ([each.wire() for each in side] for side in (inputs, outputs))
        shapes = self._worker.call(
            "run", model=self._number, network=network, inputs=sources, outputs=targets
        )
        return [tuple(shape) for shape in shapes]

    def _check_worker(self, which: str, worker: Worker) -> None:
        """Raise SophgoCallError if a tensor is in another worker than the model. which: the tensor, for the message.

        If the model's own worker has ended, nothing is raised here: the run will report the end."""
        if worker is self._worker or not self._worker.alive:
            return
        if worker.name != self._worker.name:
            detail = f"{which} is a tensor of {worker.name}, but the model is on {self._worker.name}"
        else:
            detail = (
                f"{which} is a tensor of a worker that has ended, so its data is lost: create the "
                "tensor again"
            )
        raise SophgoCallError(call="run", detail=detail)
