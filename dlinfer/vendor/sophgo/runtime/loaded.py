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
from dlinfer.vendor.sophgo.runtime.worker import Worker, memory_file

# What helps against a refusal of a kind that no other bmodel would mend.
_ADVICE = {"order": "load it before that network, or compile that one for another addr_mode"}


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
        if header.devices > len(devices):
            detail = f"it runs on {header.devices} devices, and {len(devices)} were given"
            raise self._refused(detail, "name as many devices")
        self.devices = {number: open_device(number, self.chip) for number in devices}
        self._check_chip()
        self._worker = self.devices[devices[0]].worker
        kind = chips.KINDS.get(self.chip)
        working = sorted(header.working()) if kind is not None and kind.sharing else []
        if self._worker.without_shim and (header.devices > 1 or working):
            several = f"as {header.devices} devices" if header.devices > 1 else ""
            what = f"{self._worker.name} {several or 'with networks that work in its memory'}"
            raise SophgoUnavailableError(what=what, reason=self._worker.without_shim, advice="install one")
        weights = sorted(header.weights)
        told = self._load(source, devices=devices, flags=flags, working=working, weights=weights)
        self._number: int = told["number"]
        weakref.finalize(self, self._worker.discard, "unload", self._number).atexit = False
        self.flags: int = told["flags"]
        self.networks = {each["name"]: self._network(each) for each in told["networks"]}

    def _check_chip(self) -> None:
        for device in self.devices.values():
            if device.chip != self.chip:
                detail = f"it was made for {self.chip}, and device {device.number} is {device.chip}"
                advice = f"compile the model for {device.chip}, or leave DLINFER_SOPHGO_EMULATE empty"
                raise self._refused(detail, advice)

    def _load(self, source: Any, **told: Any) -> dict[str, Any]:
        try:
            if not isinstance(source, bytes):
                path = str(Path(source).absolute())
                return self._worker.call("load", **told, path=path, size=0)
            with self._in_memory(source) as file:
                return self._worker.call("load", file.fileno(), **told, path=None, size=len(source))
        except SophgoRuntimeError as error:
            advice = _ADVICE.get(error.fields["kind"], "compile it again")
            raise self._refused(error.fields["detail"], advice) from None

    def _in_memory(self, data: bytes) -> FileIO:
        """A file in memory with ``data``."""
        try:
            file, view = memory_file(), memoryview(data)
            while view:  # a write takes at most 2 GiB
                view = view[file.write(view) :]
        except OSError as error:
            raise self._refused(f"it cannot be handed to the worker: {error}", "give it as a file") from None
        return file

    def _refused(self, detail: str, advice: str) -> SophgoModelError:
        return SophgoModelError(source=self.source, detail=detail, advice=advice)

    def _network(self, told: dict[str, Any]) -> NetworkInfo:
        sides = {side: tuple(map(self._tensor, told[side])) for side in ("inputs", "outputs")}
        return NetworkInfo(**{**told, **sides})

    @staticmethod
    def _tensor(told: dict[str, Any]) -> TensorInfo:
        memories = told.pop("memories")
        shapes = tuple(map(tuple, told.pop("shapes")))
        places = tuple(Place(each["number"], 0, each["size"]) for each in memories)
        addresses = tuple(each["address"] for each in memories)
        return TensorInfo(**told, shapes=shapes, places=places, addresses=addresses)

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
        given, taken = ([each.wire() for each in side] for side in (inputs, outputs))
        shapes = self._worker.call("run", model=self._number, network=network, inputs=given, outputs=taken)
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
