"""A loaded bmodel, whose networks BMRuntime describes and runs."""

import ctypes
import os
from typing import Any

from .chip import Chip, Memory, RefusedError
from .layout import Network, Shape, Tensor


class Model:
    """A bmodel on one or more devices of a chip. The first device runs all networks that are not distributed.

    working: the size in bytes of the largest working memory of a network, if networks share working memory; else 0."""

    def __init__(self, chip: Chip, devices: list[int], flags: int | None, working: int) -> None:
        self.chip = chip
        self.working = working
        self.devices = devices
        self._memories: list[int] = []
        handles = (ctypes.c_void_p * len(devices))(*(chip.handles[device] for device in devices))
        self._runtime = chip.bmrt.bmrt_create_ex(handles, len(devices))
        _check(self._runtime, "load", "BMRuntime could not be created")
        if flags is not None:
            chip.bmrt.bmrt_set_flags(self._runtime, flags)

    def load_file(self, path: str) -> None:
        """Load a bmodel from a file. Raises RefusedError."""
        loaded = self.chip.bmrt.bmrt_load_bmodel(self._runtime, os.fsencode(path))
        _check(loaded, "load", "BMRuntime refused it")

    def load_bytes(self, address: int, size: int) -> None:
        """Load a bmodel from memory. The caller may free that memory afterwards. Raises RefusedError."""
        loaded = self.chip.bmrt.bmrt_load_bmodel_data(self._runtime, address, size)
        _check(loaded, "load", "BMRuntime refused it")

    def describe(self) -> dict[str, Any]:
        """Return BMRuntime's flags and the bm_net_info_t of each network. Memories are given by their numbers."""
        return {
            "flags": self.chip.bmrt.bmrt_get_flags(self._runtime),
            "networks": [self._network(name) for name in self._names()],
        }

    def is_basic(self) -> bool:
        """Return whether any network has its inputs and outputs inside its working memory (addr_mode 0)."""
        infos = (self.chip.bmrt.bmrt_get_network_info(self._runtime, name) for name in self._names())
        return any(info.contents.addr_mode == 0 for info in infos)

    def _names(self) -> list[bytes]:
        number = self.chip.bmrt.bmrt_get_network_number(self._runtime)
        return [self.chip.bmrt.bmrt_get_network_name(self._runtime, index) for index in range(number)]

    def _network(self, name: bytes) -> dict[str, Any]:
        net: Network = self.chip.bmrt.bmrt_get_network_info(self._runtime, name).contents
        return {
            "name": name.decode(),
            **{field: getattr(net, field) for field in ("is_dynamic", "addr_mode", "stage_num")},
            "inputs": [self._tensor(net, "input", index) for index in range(net.input_num)],
            "outputs": [self._tensor(net, "output", index) for index in range(net.output_num)],
        }

    def _tensor(self, net: Network, side: str, index: int) -> dict[str, Any]:
        device = self.devices[getattr(net, f"{side}_devices")[index]]
        stages = [net.stages[stage] for stage in range(net.stage_num)]
        return {
            "name": getattr(net, f"{side}_names")[index].decode(),
            "dtype": getattr(net, f"{side}_dtypes")[index],
            "scale": getattr(net, f"{side}_scales")[index],
            "max_bytes": getattr(net, f"max_{side}_bytes")[index],
            "device": device,
            "shapes": [getattr(stage, f"{side}_shapes")[index].sizes() for stage in stages],
            "memories": [self._runtime_memory(stage, side, index, device) for stage in stages],
        }

    def _runtime_memory(self, stage: Any, side: str, index: int, device: int) -> dict[str, int]:
        block = getattr(stage, f"{side}_memories")[index]
        copy = type(block).from_buffer_copy(block)
        number = self.chip.know(Memory(device, copy, owned=False))
        self._memories.append(number)
        return {"number": number, "size": block.size}

    def run(self, network: str, inputs: list[Any], outputs: list[Any]) -> list[list[int]]:
        """Run a network, wait until it has finished, and return the shapes of its outputs. Raises RefusedError.

        inputs, outputs: each tensor is a list of dtype, shape, memory's number, offset, and size in bytes."""
        sources = (Tensor * len(inputs))(*map(self._c_tensor, inputs))
        targets = (Tensor * len(outputs))(*map(self._c_tensor, outputs))
        ran = self.chip.bmrt.bmrt_launch_tensor_ex(
            self._runtime, network.encode(), sources, len(inputs), targets, len(outputs), True, False
        )
        _check(ran, "launch", "BMRuntime refused to run it")
        for device in self.devices:
            status = self.chip.bmlib.bm_thread_sync(self.chip.handles[device])
            _check(not status, "launch", f"waiting for device {device} failed with bm_status_t {status}")
        return [tensor.shape.sizes() for tensor in targets]

    def _c_tensor(self, tensor: list[Any]) -> Tensor:
        dtype, shape, number, offset, size = tensor
        return Tensor(dtype, Shape.of(shape), self.chip.place(number, offset, size), 0)

    def close(self) -> None:
        self.chip.free(self._memories)
        self.chip.bmrt.bmrt_destroy(self._runtime)


def _check(done: Any, kind: str, detail: str) -> None:
    if not done:
        raise RefusedError(kind, detail)
