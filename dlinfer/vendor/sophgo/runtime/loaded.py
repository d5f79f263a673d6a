"""A bmodel on some devices: what its networks are, and running them on memory of these devices."""

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
from dlinfer.vendor.sophgo.runtime.worker import Worker


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a network: dtype is a bm_data_type_t; shapes and memory are one a stage.

    device: the number of the device that it lies on, as the caller counts.
    max_bytes: what it takes in the largest stage.
    places: the memory that the runtime gave it, for ``LoadedModel.memory``; addresses: where that lies on the device.
    """

    name: str
    dtype: int
    scale: float
    zero_point: int
    max_bytes: int
    device: int
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[Place, ...]
    addresses: tuple[int, ...]


@dataclass(frozen=True)
class NetworkInfo:
    """A named network of a bmodel. addr_mode: 0 basic, 1 io_alone, 2 io_tag, 3 io_tag_fuse, 4 io_reloc."""

    name: str
    is_dynamic: bool
    addr_mode: int
    core_num: int
    stage_num: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class Argument:
    """A tensor of a run: a bm_data_type_t, a shape and where it lies."""

    dtype: int
    shape: tuple[int, ...]
    memory: DeviceMemory

    def wire(self) -> list[Any]:
        """As a worker takes it."""
        place = self.memory.place
        return [self.dtype, list(self.shape), place.number, place.offset, place.size]


class LoadedModel:
    """A bmodel from a file or from bytes, given back with the last that refers to it.

    devices: numbers; a bmodel for several devices takes as many. flags: bm_runtime_flag_t bits, None leaves
    BMRuntime's own. Raises SophgoModelError for what is no bmodel, is not whole, is for another chip or more devices
    than given, or that BMRuntime refuses; and what ``open_device`` raises.
    """

    def __init__(
        self, source: str | os.PathLike[str] | bytes, devices: Sequence[int], flags: int | None
    ) -> None:
        devices = [number_of(device) for device in devices]
        if not devices or len(set(devices)) != len(devices):
            raise SophgoCallError(call="load", detail=f"devices {devices}: one or more different numbers")
        in_memory = isinstance(source, bytes)
        header = bmodel.read_bytes(source) if in_memory else bmodel.read_file(Path(source))
        self.source = "in memory" if in_memory else os.fspath(source)
        self.chip = chips.of_bmodel(header.chip)
        self._check_devices(header, devices)
        self.devices = {number: open_device(number, self.chip) for number in devices}
        self._check_chip()
        self._worker = self.devices[devices[0]].worker
        self._check_shim(header)
        working = sorted(header.working()) if chips.sharing(self.chip) else []
        weights = sorted(header.weights)
        told = self._load(source, devices=devices, flags=flags, working=working, weights=weights)
        self._number: int = told["number"]
        weakref.finalize(self, self._worker.discard, "unload", self._number).atexit = False
        self.flags: int = told["flags"]
        self.networks = {each["name"]: self._network(each) for each in told["networks"]}

    def _check_devices(self, header: bmodel.Header, devices: Sequence[int]) -> None:
        if header.devices > len(devices):
            detail = f"it runs on {header.devices} devices, and {len(devices)} were given"
            raise SophgoModelError(source=self.source, detail=detail, advice="name as many devices")

    def _check_shim(self, header: bmodel.Header) -> None:
        lacking = self._worker.without_shim
        if not lacking:
            return
        if header.devices > 1:
            what = f"{self._worker.name} as {header.devices} devices"
        elif chips.sharing(self.chip) and header.working():
            what = f"{self._worker.name} with networks that work in its memory"
        else:
            return
        raise SophgoUnavailableError(what=what, reason=lacking, advice="install one")

    def _check_chip(self) -> None:
        for device in self.devices.values():
            if device.chip != self.chip:
                detail = f"it was made for {self.chip}, and device {device.number} is {device.chip}"
                advice = f"compile the model for {device.chip}, or leave DLINFER_SOPHGO_EMULATE empty"
                raise SophgoModelError(source=self.source, detail=detail, advice=advice)

    def _load(self, source: Any, **told: Any) -> dict[str, Any]:
        try:
            if not isinstance(source, bytes):
                path = str(Path(source).absolute())
                return self._worker.call("load", **told, path=path, size=0)
            with self._in_memory(source) as file:
                size = len(source)
                number = file.fileno()
                return self._worker.call("load", number, **told, path=None, size=size)
        except SophgoRuntimeError as error:
            detail = error.fields["detail"]
            raise SophgoModelError(source=self.source, detail=detail, advice="compile it again") from None

    def _in_memory(self, data: bytes) -> FileIO:
        """A file in memory with ``data``."""
        try:
            file = FileIO(os.memfd_create("bmodel", os.MFD_CLOEXEC), "r+")
            view = memoryview(data)
            while view:  # a write takes at most 2 GiB
                view = view[file.write(view) :]
        except OSError as error:
            detail = f"it cannot be handed to the worker: {error}"
            raise SophgoModelError(source=self.source, detail=detail, advice="give it as a file") from None
        return file

    def _network(self, told: dict[str, Any]) -> NetworkInfo:
        inputs = tuple(self._tensor(each) for each in told.pop("inputs"))
        outputs = tuple(self._tensor(each) for each in told.pop("outputs"))
        return NetworkInfo(**told, inputs=inputs, outputs=outputs)

    @staticmethod
    def _tensor(told: dict[str, Any]) -> TensorInfo:
        memories = told.pop("memories")
        shapes = tuple(tuple(shape) for shape in told.pop("shapes"))
        places = tuple(Place(each["number"], 0, each["size"]) for each in memories)
        return TensorInfo(
            **told, shapes=shapes, places=places, addresses=tuple(each["address"] for each in memories)
        )

    def memory(self, tensor: TensorInfo, stage: int) -> DeviceMemory:
        """Return what the runtime gave an input or output of this model; it keeps the model."""
        return DeviceMemory(self.devices[tensor.device], tensor.places[stage], self)

    def run(
        self, network: str, inputs: Sequence[Argument], outputs: Sequence[Argument]
    ) -> list[tuple[int, ...]]:
        """Run a network and wait for its end; the outputs' memory is written. Gives the outputs' shapes.

        Nothing is checked here but that all memory is of this model's worker: BMRuntime refuses what does not fit,
        or ends the worker. Raises SophgoCallError, and what a worker raises.
        """
        for side, arguments in (("input", inputs), ("output", outputs)):
            for index, argument in enumerate(arguments):
                self._check_worker(f"{side} {index} of {network!r}", argument.memory.device.worker)
        shapes = self._worker.call(
            "run",
            model=self._number,
            network=network,
            inputs=[each.wire() for each in inputs],
            outputs=[each.wire() for each in outputs],
        )
        return [tuple(shape) for shape in shapes]

    def _check_worker(self, which: str, worker: Worker) -> None:
        """Where the model's own is gone, running it says so."""
        if worker is self._worker or not self._worker.alive:
            return
        if worker.name != self._worker.name:
            detail = f"{which} is a tensor of {worker.name}, and the model is on {self._worker.name}"
        else:
            detail = f"{which} is a tensor of a worker that is gone, with all that was on it: make the tensor again"
        raise SophgoCallError(call="run", detail=detail)
