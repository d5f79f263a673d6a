"""The tensors of a ``process``, checked against what a graph takes before the C library sees them.

BMRuntime ends its process over some of these mistakes and computes with others.
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
    network: NetworkInfo, given: Mapping[int, Tensor], taken: Mapping[int, Tensor]
) -> tuple[list[Argument], list[Argument]]:
    """Inputs and outputs for the runtime. Raises SophgoCallError, naming the tensor and what it should be."""
    inputs = _listed(network, "input", network.inputs, given)
    outputs = _listed(network, "output", network.outputs, taken)
    stage = _stage(network, [argument.shape for argument in inputs])
    for index, (argument, info) in enumerate(zip(outputs, network.outputs, strict=True)):
        _check_output(network, f"output {index} ({info.name})", argument, info, stage)
    return inputs, outputs


def _listed(
    network: NetworkInfo, side: str, wanted: Sequence[TensorInfo], given: Mapping[int, Tensor]
) -> list[Argument]:
    """The tensors in order, each of the graph's type and on its device."""
    if not isinstance(given, Mapping) or set(given) != set(range(len(wanted))):
        named = sorted(given, key=str) if isinstance(given, Mapping) else type(given).__name__
        raise _refuse(network, f"its {side}s are a dict of 0 to {len(wanted) - 1}, given {named}")
    return [
        _argument(network, f"{side} {index} ({info.name})", given[index], info)
        for index, info in enumerate(wanted)
    ]


def _argument(network: NetworkInfo, which: str, tensor: Any, info: TensorInfo) -> Argument:
    if not isinstance(tensor, Tensor):
        raise _refuse(network, f"{which} is no sail.Tensor but {type(tensor).__name__}")
    if tensor.dtype() != info.dtype:
        raise _refuse(network, f"{which} is {Dtype(info.dtype).name}, given {tensor.dtype().name}")
    if tensor.device_id() != info.device:
        place = f"device {tensor.device_id()}" if tensor.device_id() >= 0 else "no device"
        raise _refuse(network, f"{which} lies on device {info.device}, given a tensor on {place}")
    return Argument(info.dtype, tuple(tensor.shape()), tensor.device_memory())


def _stage(network: NetworkInfo, shapes: list[tuple[int, ...]]) -> int | None:
    """The stage of these shapes; None for a dynamic graph, which takes smaller ones than its stages."""
    stages = [tuple(info.shapes[stage] for info in network.inputs) for stage in range(network.stage_num)]
    if (given := tuple(shapes)) in stages:
        return stages.index(given)
    if network.is_dynamic and any(_fits(shapes, stage) for stage in stages):
        return None
    rule = "at most those" if network.is_dynamic else "those"
    raise _refuse(
        network, f"inputs of shapes {_text(shapes)}; it takes {rule} of {' or '.join(map(_text, stages))}"
    )


def _fits(shapes: Sequence[tuple[int, ...]], stage: Sequence[tuple[int, ...]]) -> bool:
    return all(
        len(shape) == len(most) and all(size <= limit for size, limit in zip(shape, most, strict=True))
        for shape, most in zip(shapes, stage, strict=True)
    )


def _check_output(
    network: NetworkInfo, which: str, given: Argument, info: TensorInfo, stage: int | None
) -> None:
    """Memory for all that the graph writes. Of a dynamic graph only the most is known."""
    width = NUMPY[Dtype(info.dtype)].itemsize
    needed = prod(info.shapes[stage]) * width if stage is not None else info.max_bytes
    if given.memory.size < needed:
        raise _refuse(network, f"{which} takes {needed} bytes, given memory of {given.memory.size}")
    if stage is not None and given.shape != info.shapes[stage]:
        raise _refuse(network, f"{which} has shape {list(info.shapes[stage])}, given {list(given.shape)}")


def _text(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _refuse(network: NetworkInfo, detail: str) -> SophgoCallError:
    return refuse(f"EngineLLM.process({network.name!r})", detail)
