"""A region's model at run time: a network of MegEngine Lite in this process, which reads torch's tensors in place."""

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from dlinfer.graph.engine_kit.refused import WrongInputError
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import fake
from dlinfer.vendor.megengine import lite
from dlinfer.vendor.megengine.nodes import NodeList

_INT32 = torch.iinfo(torch.int32)


class Network:
    """A region's function as a callable: it takes the function's inputs and returns its outputs. Threads take turns."""

    def __init__(self, function: Function, graph: NodeList, model: bytes, threads: int) -> None:
        self._lock = threading.Lock()
        self._network = network = lite.LiteNetwork()
        if threads > 1:
            network.threads_number = threads
        else:
            network.enable_cpu_inplace_mode()
        network.load(model)
        names = [node.name for node in function.inputs]
        phases = lite.LiteTensorPhase
        self._inputs = [
            _Input(names.index(name), network.get_io_tensor(name, phases.LITE_INPUT), graph.indices.get(name))
            for name, _, _ in graph.inputs
        ]
        self._outputs = [
            (network.get_io_tensor(f"result_{index}", phases.LITE_OUTPUT), fake(node).dtype)
            for index, node in enumerate(function.outputs)
        ]

    def __call__(self, *inputs: Any) -> list[Tensor]:
        with self._lock:
            kept = [entry.feed(inputs[entry.index]) for entry in self._inputs]
            self._network.forward()
            self._network.wait()
            values = [_taken(tensor, dtype) for tensor, dtype in self._outputs]
        del kept  # the network has read it
        return values


def _taken(tensor: lite.LiteTensor, dtype: torch.dtype) -> Tensor:
    """Copy a result into a torch tensor, since the next run overwrites the result."""
    value = torch.from_numpy(tensor.to_numpy())
    return value.view(torch.bool) if dtype == torch.bool else value


class _Input:
    """One input of the network. It remembers the address that the network reads.

    index: the position of this input among the function's inputs.
    rows: if the input holds indices of an embedding, the number of rows of the embedding's table; else None."""

    def __init__(self, index: int, tensor: lite.LiteTensor, rows: int | None) -> None:
        self.index = index
        self._tensor = tensor
        self._size = tensor.nbytes
        self._rows = rows
        self._place = 0

    def feed(self, tensor: Tensor) -> Tensor:
        """Let the network read a tensor in place.

        Return the tensor that the caller must keep alive until the run has ended."""
        value = tensor.detach()
        if self._rows is not None:
            value = _checked(value, self._rows)
        elif value.dtype == torch.bool:
            value = value.contiguous().view(torch.uint8)
        value = value.contiguous()
        place = value.data_ptr()
        if place != self._place:
            self._tensor.set_data_by_share(ctypes.c_void_p(place), self._size)
            self._place = place
        return value


def _checked(indices: Tensor, rows: int) -> Tensor:
    """Return indices of an embedding as int32. rows: the number of rows of the embedding's table.

    Raises WrongInputError for an index that the table lacks, because MegEngine does not check indices."""
    low, high = torch.aminmax(indices)
    if int(low) < 0 or int(high) >= min(rows, _INT32.max):
        raise WrongInputError(f"{int(low)} to {int(high)} for {rows} rows")
    return indices.to(torch.int32)
