"""Run a compiled model on torch's memory: one infer request per thread, with input tensors bound to it.

Binding a tensor costs more than running a small model. So a request remembers the address and sizes of each input, and
binds only inputs that changed. It does not keep the caller's tensors alive. If a later tensor has the same address and
sizes, the old binding is right for the later tensor too."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import openvino as ov
import torch
from torch import Tensor

from dlinfer.vendor.openvino.devices import check_process
from dlinfer.vendor.openvino.dtypes import shared
from dlinfer.vendor.openvino.workarounds.constants import NOWHERE, no_places


class Requests:
    """Callable: takes tensors for a compiled model's parameters and returns fresh tensors of its outputs.

    Several threads may call it concurrently. Each thread has its own request. A request's intermediate memory stays
    until its thread ends.
    """

    def __init__(self, compiled: ov.CompiledModel, dtypes: Sequence[torch.dtype], keep: Any) -> None:
        """dtypes: the outputs' dtypes. keep: memory of the model's constants, which must stay alive with the model."""
        self._compiled = compiled
        self._dtypes = tuple(dtypes)
        self._keep = keep
        self._local = threading.local()

    def __call__(self, tensors: Sequence[Tensor], sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Run the model. tensors: contiguous, one for each parameter. sizes: each output's sizes."""
        check_process()
        try:
            request: _Request = self._local.request
        except AttributeError:
            request = self._local.request = _Request(self._compiled)
        return request.run(tensors, sizes, self._dtypes)


class _Request:
    def __init__(self, compiled: ov.CompiledModel) -> None:
        self._request = compiled.create_infer_request()
        self._set_input: Callable[[int, ov.Tensor], None] = self._request.set_input_tensor
        self._places: list[tuple[int, torch.Size] | None] = [None] * len(compiled.inputs)
        if compiled.inputs and compiled.inputs[-1].get_node().get_friendly_name() == NOWHERE:
            self._set_input(len(compiled.inputs) - 1, no_places())

    def run(
        self, tensors: Sequence[Tensor], sizes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        places = self._places
        for index, tensor in enumerate(tensors):
            place = (tensor.data_ptr(), tensor.shape)
            if places[index] != place:
                self._set_input(index, shared(tensor))
                places[index] = place
        results = [torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
        for index, result in enumerate(results):
            self._request.set_output_tensor(index, shared(result))
        self._request.start_async()
        self._request.wait()
        return results
