"""A region's bmodel on a device.

It copies torch's tensors to the device and back, and converts them to the net's dtypes."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dlinfer.vendor.sophgo.errors import SophgoRuntimeError, SophgoWorkerError
from dlinfer.vendor.sophgo.runtime.loaded import Argument, LoadedModel, TensorInfo
from dlinfer.vendor.sophgo.sail.types import Dtype

_DTYPES = {dtype: getattr(torch, dtype.name.removeprefix("BM_").lower()) for dtype in Dtype}


class Net:
    """The only net of a bmodel file. The caller lets one thread at a time run it.

    The file is loaded at the first run, and again after its worker process has ended.
    outputs: the number of the region's outputs. The compiler keeps their order, but leaves out unused inputs."""

    def __init__(self, path: Path, device: int, outputs: int) -> None:
        self._path = path
        self._device = device
        self._outputs = outputs
        self._model: LoadedModel | None = None

    def run(self, inputs: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        """Run the net on ``inputs``, which are given by name, and write its outputs to the tensors ``results``.

        Raises the errors of a worker."""
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
                detail = f"the bmodel has {len(net.outputs)} outputs, but the region has {self._outputs}"
                raise SophgoRuntimeError(chip=model.chip, call="load", kind="layout", detail=detail)
            self._model = model
        return self._model

    @staticmethod
    def _run(model: LoadedModel, inputs: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        (net,) = model.networks.values()
        sources = [_argument(model, info, inputs[info.name]) for info in net.inputs]
        targets = [_argument(model, info, value) for info, value in zip(net.outputs, results, strict=True)]
        for info, argument in zip(net.inputs, sources, strict=True):
            value = inputs[info.name].detach().to(_DTYPES[Dtype(info.dtype)])
            argument.memory.write(_bytes(value.contiguous()))
        model.run(net.name, sources, targets)
        for result, argument in zip(results, targets, strict=True):
            read = torch.empty(result.shape, dtype=_DTYPES[Dtype(argument.dtype)])
            argument.memory.part(0, read.nbytes).read(_bytes(read))
            result.copy_(read)


def _argument(model: LoadedModel, info: TensorInfo, value: Tensor) -> Argument:
    """Return an input or output of the net as an argument of ``model.run``.

    The argument uses memory that BMRuntime has reserved for this input or output, since the bmodel's addr_mode is
    ``io_alone``.
    value: the region's tensor. Raises SophgoRuntimeError if it has another number of elements than the net's."""
    shape = info.shapes[0]
    if prod(shape) != value.numel():
        detail = f"{info.name} has shape {list(shape)} in the bmodel, but {list(value.shape)} in the region"
        raise SophgoRuntimeError(chip=model.chip, call="run", kind="layout", detail=detail)
    return Argument(info.dtype, shape, model.memory(info, 0))


def _bytes(value: Tensor) -> memoryview:
    return value.reshape(-1).view(torch.uint8).numpy().data
