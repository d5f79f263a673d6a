"""A compiled region: its inputs where torch has them, in a network of MegEngine Lite in this process."""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from dlinfer.errors import GraphRunError
from dlinfer.graph.functional.function import Function
from dlinfer.vendor.megengine import lite
from dlinfer.vendor.megengine.nodes import NodeList

_INT32 = torch.iinfo(torch.int32)


class RegionRun:
    """Callable with the region's inputs; threads take turns, since a network runs one at a time.

    source: the node list as text.
    """

    def __init__(
        self, function: Function, graph: NodeList, model: bytes, dtypes: Sequence[torch.dtype], threads: int
    ) -> None:
        self._function = function
        self._graph = graph
        self._lock = threading.Lock()
        self._network = network = lite.LiteNetwork()
        if threads > 1:
            network.threads_number = threads
        else:
            network.enable_cpu_inplace_mode()
        network.load(model)
        names = [node.name for node in function.graph_module.graph.find_nodes(op="placeholder")]
        self._inputs = [
            _Input(
                names.index(name), name, network.get_io_tensor(name, lite.LiteTensorPhase.LITE_INPUT), graph
            )
            for name, _, _ in graph.inputs
        ]
        phase = lite.LiteTensorPhase.LITE_OUTPUT
        self._outputs = [
            (network.get_io_tensor(f"result_{index}", phase), dtype) for index, dtype in enumerate(dtypes)
        ]
        self.source = "\n".join(
            f"{node['name']} = {node['op']}({', '.join(map(str, node['operands']))}) {node['attributes'] or ''}"
            for node in graph.nodes
        )

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        self._function.check(inputs)
        with self._lock:
            kept = [one.feed(inputs[one.index]) for one in self._inputs]
            self._network.forward()
            self._network.wait()
            values = [self._taken(tensor, dtype) for tensor, dtype in self._outputs]
        del kept  # which the network has read now
        return self._function.finish(inputs, values)

    def _taken(self, tensor: lite.LiteTensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a result: the network writes it again at the next run."""
        value = torch.from_numpy(tensor.to_numpy())
        return value.view(torch.bool) if dtype == torch.bool else value


class _Input:
    """One input of the network, and where it was told to look last."""

    def __init__(self, index: int, name: str, tensor: lite.LiteTensor, graph: NodeList) -> None:
        self.index = index
        self._name = name
        self._tensor = tensor
        self._size = tensor.nbytes
        self._rows = graph.indices.get(name)
        self._place = 0

    def feed(self, given: torch.Tensor) -> torch.Tensor:
        """Let the network read a tensor where it lies. Gives what must live until the run has ended."""
        value = given.detach()
        if self._rows is not None:
            value = self._checked(value)
        elif value.dtype == torch.bool:
            value = value.contiguous().view(torch.uint8)
        value = value.contiguous()
        place = value.data_ptr()
        if place != self._place:
            self._tensor.set_data_by_share(ctypes.c_void_p(place), self._size)
            self._place = place
        return value

    def _checked(self, indices: torch.Tensor) -> torch.Tensor:
        """Numbers of rows as int32, which MegEngine looks up without asking."""
        assert self._rows is not None
        low, high = torch.aminmax(indices)
        if int(low) < 0 or int(high) >= min(self._rows, _INT32.max):
            raise GraphRunError(
                region="a region of engine 'megengine'",
                node=self._name,
                op="aten.embedding",
                line="the model's call",
                detail=f"index out of range: {int(low)} to {int(high)} for {self._rows} rows",
            )
        return indices.to(torch.int32)
