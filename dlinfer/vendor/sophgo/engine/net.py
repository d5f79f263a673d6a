"""A region's bmodel on a device: torch's tensors copied in and out by the dtypes that the net has."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dlinfer.vendor.sophgo.errors import SophgoRuntimeError, SophgoWorkerError
from dlinfer.vendor.sophgo.runtime.loaded import Argument, LoadedModel, TensorInfo
from dlinfer.vendor.sophgo.sail.types import Dtype

_DTYPES = {
    Dtype.BM_FLOAT32: torch.float32,
    Dtype.BM_FLOAT16: torch.float16,
    Dtype.BM_INT8: torch.int8,
    Dtype.BM_UINT8: torch.uint8,
    Dtype.BM_INT32: torch.int32,
    Dtype.BM_BFLOAT16: torch.bfloat16,
}


class Net:
    """One net of a bmodel's file. Loaded at the first run, and anew after a worker that ended.

    outputs: how many the model has; the compiler keeps their order, and drops inputs that nothing depends on.
    One run at a time.
    """

    def __init__(self, path: Path, device: int, outputs: int) -> None:
        self._path = path
        self._device = device
        self._outputs = outputs
        self._model: LoadedModel | None = None

    def run(self, inputs: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        """Run it on inputs by their names, and write ``results``. Raises what a worker raises."""
        try:
            self._run(self._loaded(), inputs, results)
        except SophgoWorkerError:
            self._model = None
            raise

    def _loaded(self) -> LoadedModel:
        if self._model is None:
            model = LoadedModel(self._path, [self._device], None)
            (net,) = model.networks.values()
            if len(net.outputs) != self._outputs:
                detail = f"the bmodel has {len(net.outputs)} outputs, the region {self._outputs}"
                raise SophgoRuntimeError(chip=model.chip, call="load", kind="layout", detail=detail)
            self._model = model
        return self._model

    @staticmethod
    def _run(model: LoadedModel, inputs: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        (net,) = model.networks.values()
        given = [_argument(model, info) for info in net.inputs]
        taken = [_argument(model, info) for info in net.outputs]
        for info, argument in zip(net.inputs, given, strict=True):
            value = inputs[info.name]
            _check(model, info, value)
            flat = value.detach().to(_DTYPES[Dtype(info.dtype)]).contiguous().reshape(-1)
            argument.memory.write(flat.view(torch.uint8).numpy().data)
        model.run(net.name, given, taken)
        for result, info, argument in zip(results, net.outputs, taken, strict=True):
            _check(model, info, result)
            read = torch.empty(result.shape, dtype=_DTYPES[Dtype(info.dtype)])
            argument.memory.part(0, read.nbytes).read(read.reshape(-1).view(torch.uint8).numpy().data)
            result.copy_(read)


def _argument(model: LoadedModel, info: TensorInfo) -> Argument:
    """The net's own memory, which ``io_alone`` gives it."""
    return Argument(info.dtype, info.shapes[0], model.memory(info, 0))


def _check(model: LoadedModel, info: TensorInfo, value: Tensor) -> None:
    if prod(info.shapes[0]) != value.numel():
        detail = (
            f"{info.name} has {list(info.shapes[0])} in the bmodel, and {list(value.shape)} in the region"
        )
        raise SophgoRuntimeError(chip=model.chip, call="run", kind="layout", detail=detail)
