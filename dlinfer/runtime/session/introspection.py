"""Queries that a session answers even before ``setup``: entries, stages, inputs, outputs, and the session's own
tensors.

Names of methods, and indexes, follow Sophgo's ``sail.EngineLLM``. Where sail says graph, this module says entry.
"""

from collections.abc import Mapping, Sequence

import torch

from dlinfer.errors import SessionCallError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port
from dlinfer.runtime.options import SessionOptions
from dlinfer.runtime.session.io_memory import SIDES, IoMemory, RuntimeMemory, Side, ports_of

Tensors = dict[int, torch.Tensor]
"""Index of an input or output -> the session's tensor for it."""


class Introspection:
    """The methods of a Session that describe its entries. They read the interface of each entry's stages."""

    devices: list[torch.device]
    options: SessionOptions
    _signatures: Mapping[str, Sequence[Interface]]
    _io: IoMemory | None
    _memory: RuntimeMemory

    def signature(self, entry: str | None = None, stage: int = 0) -> Interface:
        """Return the inputs and outputs of an entry's stage. ``entry`` may be omitted if the artifact has only one."""
        name = self._entry(entry)
        stages = self._signatures[name]
        if type(stage) is not int or not 0 <= stage < len(stages):
            raise SessionCallError(
                what=f"entry {name!r}: stage",
                name=stage,
                detail=f"the entry has {len(stages)} stages, numbered from 0",
            )
        return stages[stage]

    def _entry(self, entry: str | None) -> str:
        if entry is None and len(self._signatures) == 1:
            return next(iter(self._signatures))
        if entry is None or entry not in self._signatures:
            detail = f"the entries are {', '.join(self._signatures)}"
            raise SessionCallError(what="entry", name=entry or "", detail=detail)
        return entry

    def _port(self, entry: str, index: int, side: Side, stage: int = 0) -> Port:
        ports = ports_of(self.signature(entry, stage), side)
        if type(index) is not int or not 0 <= index < len(ports):
            detail = f"entry {entry!r} has {len(ports)} {side}, numbered from 0"
            raise SessionCallError(what=f"index of {side}", name=index, detail=detail)
        return ports[index]

    def get_device_ids(self) -> list[int]:
        """Return the index of each device that the session runs on."""
        return [device.index or 0 for device in self.devices]

    def get_graph_names(self) -> list[str]:
        """Return the names of all entries."""
        return list(self._signatures)

    def get_addr_mode(self, entry: str) -> int:
        """Return 1 if inputs and outputs are tensors of the session (``io="owned"``), else 0."""
        self.signature(entry)
        return int(self.options.io == "owned")

    def get_stage_num(self, entry: str) -> int:
        """Return how many stages an entry has."""
        return len(self._signatures[self._entry(entry)])

    def get_input_num(self, entry: str) -> int:
        """Return how many inputs an entry has."""
        return len(self.signature(entry).inputs)

    def get_output_num(self, entry: str) -> int:
        """Return how many outputs an entry has."""
        return len(self.signature(entry).outputs)

    def get_is_dynamic(self, entry: str) -> bool:
        """Return whether any size of an entry may change from call to call."""
        return self.signature(entry).is_dynamic

    def get_input_name(self, entry: str, index: int) -> str:
        """Return the name of an input."""
        return self._port(entry, index, "inputs").name

    def get_output_name(self, entry: str, index: int) -> str:
        """Return the name of an output."""
        return self._port(entry, index, "outputs").name

    def get_input_tensor_devid(self, entry: str, index: int) -> int:
        """Return the index of the device that an input lies on."""
        return self._port(entry, index, "inputs").device.index or 0

    def get_output_tensor_devid(self, entry: str, index: int) -> int:
        """Return the index of the device that an output lies on."""
        return self._port(entry, index, "outputs").device.index or 0

    def get_input_shape(self, entry: str, index: int, stage: int = 0) -> list[int]:
        """Return the sizes of an input in a stage. A dynamic size is its highest value, or -1 if it has no limit."""
        return list(self._port(entry, index, "inputs", stage).max_shape)

    def get_output_shape(self, entry: str, index: int, stage: int = 0) -> list[int]:
        """Return the sizes of an output in a stage. A dynamic size is its highest value, or -1 if it has no limit."""
        return list(self._port(entry, index, "outputs", stage).max_shape)

    def get_input_max_shape(self, entry: str, index: int) -> list[int]:
        """Return the highest sizes of an input over all stages."""
        return self._max_shape(entry, index, "inputs")

    def get_output_max_shape(self, entry: str, index: int) -> list[int]:
        """Return the highest sizes of an output over all stages."""
        return self._max_shape(entry, index, "outputs")

    def _max_shape(self, entry: str, index: int, side: Side) -> list[int]:
        stages = range(self.get_stage_num(entry))
        shapes = [self._port(entry, index, side, stage).max_shape for stage in stages]
        return [-1 if -1 in sizes else max(sizes) for sizes in zip(*shapes, strict=True)]

    def get_input_dtype(self, entry: str, index: int) -> torch.dtype:
        """Return the dtype of an input."""
        return self._port(entry, index, "inputs").dtype

    def get_output_dtype(self, entry: str, index: int) -> torch.dtype:
        """Return the dtype of an output."""
        return self._port(entry, index, "outputs").dtype

    def get_input_scale(self, entry: str, index: int) -> float:
        """Return the quantisation scale of an input: 1.0, because inputs are never quantised."""
        self._port(entry, index, "inputs")
        return 1.0

    def get_output_scale(self, entry: str, index: int) -> float:
        """Return the quantisation scale of an output: 1.0, because outputs are never quantised."""
        self._port(entry, index, "outputs")
        return 1.0

    def model_input_shape_dict(self, entry: str | None = None) -> dict[str, tuple[list[int], str]]:
        """Return, for each input, name -> (sizes as ``get_input_shape`` returns them, numpy's name of the dtype)."""
        return _shapes_and_dtypes(self.signature(entry).inputs)

    def model_output_shape_dict(self, entry: str | None = None) -> dict[str, tuple[list[int], str]]:
        """Return, for each output, name -> (sizes as ``get_output_shape`` returns them, numpy's name of the dtype)."""
        return _shapes_and_dtypes(self.signature(entry).outputs)

    # --- the session's own tensors

    def get_input_tensors(self, entry: str, tensor_name: str | None = None, stage: int = 0) -> Tensors:
        """Return index -> the session's own tensor, for each input or, if set, only for the input ``tensor_name``.

        Each tensor has the highest sizes of its input. A run does not copy an input that is one of these tensors, or a
        view from ``io_tensor``. The result is empty if ``get_addr_mode`` returns 0.
        """
        return self._own(entry, "inputs", stage, tensor_name) if self.get_addr_mode(entry) else {}

    def get_output_tensors(self, entry: str, tensor_name: str | None = None, stage: int = 0) -> Tensors:
        """Return index -> the session's own tensor, for each output or, if set, only for the output ``tensor_name``.

        Every run overwrites these tensors. The result is empty if ``get_addr_mode`` returns 0.
        """
        return self._own(entry, "outputs", stage, tensor_name) if self.get_addr_mode(entry) else {}

    def get_input_tensor(self, entry: str, index: int, stage: int = 0) -> torch.Tensor:
        """Return the session's own tensor of an input. Raises SessionCallError if ``get_addr_mode`` returns 0."""
        return self._own_one(entry, index, "inputs", stage)

    def get_output_tensor(self, entry: str, index: int, stage: int = 0) -> torch.Tensor:
        """Return the session's own tensor of an output. Raises SessionCallError if ``get_addr_mode`` returns 0."""
        return self._own_one(entry, index, "outputs", stage)

    def get_input_tensors_addrmode0(self, entry: str, stage: int = 0) -> Tensors:
        """Return index -> the session's own tensor of each input, even if ``get_addr_mode`` returns 0.

        The caller must ensure that no other run uses the tensors at the same time.
        """
        return self._own(entry, "inputs", stage)

    def get_output_tensors_addrmode0(self, entry: str, stage: int = 0) -> Tensors:
        """Return index -> the session's own tensor of each output, even if ``get_addr_mode`` returns 0.

        If ``get_addr_mode`` returns 0, a run writes to these tensors only if the caller passes them as ``outputs``.
        """
        return self._own(entry, "outputs", stage)

    def io_tensor(self, entry: str, name: str, shape: Sequence[int], stage: int = 0) -> torch.Tensor:
        """Return a contiguous tensor of ``shape`` in the memory of the session's own tensor for the input or output
        ``name``.

        Raises SessionCallError if ``shape`` exceeds the highest sizes.
        """
        signature = self.signature(entry, stage)
        for side in SIDES:
            for port in ports_of(signature, side):
                if port.name == name and not port.number:
                    return self._own_memory.tensor(self._entry(entry), stage, side, port, shape)
        detail = f"entry {entry!r} has no input and no output of this name"
        raise SessionCallError(what="tensor", name=name, detail=detail)

    def _own(self, entry: str, side: Side, stage: int, tensor_name: str | None = None) -> Tensors:
        ports = ports_of(self.signature(entry, stage), side)
        if tensor_name is not None and tensor_name not in [port.name for port in ports]:
            detail = f"entry {entry!r} has no tensor of this name"
            raise SessionCallError(what=side[:-1], name=tensor_name, detail=detail)
        return {
            index: self._own_memory.tensor(self._entry(entry), stage, side, port)
            for index, port in enumerate(ports)
            if tensor_name in (None, port.name) and not port.number
        }

    def _own_one(self, entry: str, index: int, side: Side, stage: int) -> torch.Tensor:
        port = self._port(entry, index, side, stage)
        if not self.get_addr_mode(entry):
            detail = (
                'the session has no tensors of its own (addr_mode 0); load it with options={"io": "owned"}'
            )
            raise SessionCallError(what="the session's own tensor for", name=port.name, detail=detail)
        return self._own_memory.tensor(self._entry(entry), stage, side, port)

    @property
    def _own_memory(self) -> IoMemory:
        with self._memory.lock:
            if self._io is None:
                self._io = IoMemory(self._signatures, self._memory)
            return self._io


def _shapes_and_dtypes(ports: Sequence[Port]) -> dict[str, tuple[list[int], str]]:
    return {port.name: (list(port.max_shape), str(port.dtype).removeprefix("torch.")) for port in ports}
