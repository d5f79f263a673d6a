"""Compare the tensors of a ``process`` call with the graph's inputs and outputs.

Without this check, some mistakes would end BMRuntime's process, and others would give wrong numbers.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from dlinfer.vendor.sophgo.errors import SophgoCallError
from dlinfer.vendor.sophgo.runtime.loaded import Argument, NetworkInfo, TensorInfo
from dlinfer.vendor.sophgo.sail.checks import refuse
from dlinfer.vendor.sophgo.sail.tensor import Tensor
from dlinfer.vendor.sophgo.sail.types import NUMPY, Dtype


def arguments(
    network: NetworkInfo, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]
) -> tuple[list[Argument], list[Argument]]:
    """Return the inputs and the outputs of a run, as two lists for ``LoadedModel.run``.

    Raises SophgoCallError for a tensor that differs from the graph's in dtype, device, shape or size.
    """
    sources = _listed(network, "input", network.inputs, inputs)
    targets = _listed(network, "output", network.outputs, outputs)
    stage = _stage(network, [argument.shape for argument in sources])
    for index, (argument, info) in enumerate(zip(targets, network.outputs, strict=True)):
        _check_output(network, f"output {index} ({info.name})", argument, info, stage)
    return sources, targets


def _listed(
    network: NetworkInfo, side: str, infos: Sequence[TensorInfo], tensors: Mapping[int, Tensor]
) -> list[Argument]:
    """Return the tensors as a list in the order of ``infos``.

    side: "input" or "output", for messages. Raises SophgoCallError if a tensor is missing, or has another dtype or
        device.
    """
    if not isinstance(tensors, Mapping) or set(tensors) != set(range(len(infos))):
        actual = sorted(tensors, key=str) if isinstance(tensors, Mapping) else type(tensors).__name__
        raise _refuse(network, f"its {side}s must be a dict with keys 0 to {len(infos) - 1}, given {actual}")
    return [
        _argument(network, f"{side} {index} ({info.name})", tensors[index], info)
        for index, info in enumerate(infos)
    ]


def _argument(network: NetworkInfo, which: str, tensor: Any, info: TensorInfo) -> Argument:
    if not isinstance(tensor, Tensor):
        raise _refuse(network, f"{which} is not a sail.Tensor but {type(tensor).__name__}")
    if tensor.dtype() != info.dtype:
        raise _refuse(network, f"{which} must be {Dtype(info.dtype).name}, given {tensor.dtype().name}")
    if tensor.device_id() != info.device:
        place = f"device {tensor.device_id()}" if tensor.device_id() >= 0 else "no device"
        raise _refuse(network, f"{which} must be on device {info.device}, given a tensor on {place}")
    return Argument(info.dtype, tuple(tensor.shape()), tensor.device_memory())


def _stage(network: NetworkInfo, shapes: list[tuple[int, ...]]) -> int | None:
    """Return the stage whose inputs have these shapes. Return None if a dynamic graph takes them as smaller shapes.

    Raises SophgoCallError if the graph does not take these shapes.
    """
    stages = [tuple(info.shapes[stage] for info in network.inputs) for stage in range(network.stage_num)]
    if tuple(shapes) in stages:
        return stages.index(tuple(shapes))
    if network.is_dynamic and any(_fits(shapes, stage) for stage in stages):
        return None
    rule = "at most those" if network.is_dynamic else "those"
    raise _refuse(
        network,
        f"the inputs have shapes {_text(shapes)}; the graph takes {rule} of "
        f"{' or '.join(map(_text, stages))}",
    )


def _fits(shapes: Sequence[tuple[int, ...]], stage: Sequence[tuple[int, ...]]) -> bool:
    return all(
        len(shape) == len(most) and all(size <= limit for size, limit in zip(shape, most, strict=True))
        for shape, most in zip(shapes, stage, strict=True)
    )


def _check_output(
    network: NetworkInfo, which: str, output: Argument, info: TensorInfo, stage: int | None
) -> None:
    """Raise SophgoCallError if an output's memory is too small, or if its shape is wrong.

    which: the output, for the message.
    stage: the stage of the inputs; None if the inputs are smaller than a stage's. With None the memory must hold the
        output's largest shape, and the tensor may have any shape.
    """
    width = NUMPY[Dtype(info.dtype)].itemsize
    needed = prod(info.shapes[stage]) * width if stage is not None else info.max_bytes
    if output.memory.size < needed:
        raise _refuse(network, f"{which} needs {needed} bytes, given memory of {output.memory.size}")
    if stage is not None and output.shape != info.shapes[stage]:
        raise _refuse(
            network, f"{which} must have shape {list(info.shapes[stage])}, given {list(output.shape)}"
        )


def _text(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _refuse(network: NetworkInfo, detail: str) -> SophgoCallError:
    return refuse(f"EngineLLM.process({network.name!r})", detail)
