"""Convert the values of one run: the caller's inputs to a stage's inputs, and results to the caller's kind of array."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy
import torch

from dlinfer.errors import ArtifactInputError, SessionCallError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.interface.ports import Port, is_plain, shown
from dlinfer.runtime.artifact.loading import LoadedStage
from dlinfer.runtime.session.arrays import Array, array_of, tensor_of, torch_may_use

Results: TypeAlias = dict[str, Any]
"""Result name -> tensor, numpy array, number or text."""


class Values:
    """The inputs of one run.

    bound: the values that the graph is called with. symbols: the value of each symbolic size.
    """

    def __init__(self, interface: Interface, inputs: Mapping[str, object]) -> None:
        """Bind the inputs to the stage's inputs.

        Raises SessionCallError for wrong names. Raises ArtifactInputError for a value whose dtype, sizes or device the
        stage does not accept.
        """
        if not isinstance(cast("object", inputs), Mapping):
            raise ArtifactInputError(name="inputs", expected="a dict of name to value", given=shown(inputs))
        names = [port.name for port in interface.inputs]
        if set(inputs) != set(names):
            missing = sorted(set(names) - set(inputs))
            unknown = sorted(set(inputs) - set(names), key=str)
            wrong = (missing or unknown)[0]
            detail = (
                f"the inputs are {', '.join(names)}"
                if unknown and not missing
                else "no value was passed for it"
            )
            raise SessionCallError(what="input", name=wrong, detail=detail)
        arrays = [value for value in inputs.values() if not isinstance(value, int)]
        self._gives_numpy = bool(arrays) and not any(isinstance(value, torch.Tensor) for value in arrays)
        tensors = [_tensor_of(port, inputs[port.name]) for port in interface.inputs]
        self.bound, symbols = interface.bind(tensors)
        self.symbols = dict(zip(interface.places, symbols, strict=True))

    def named(self, stage: LoadedStage, results: Sequence[object], outputs: Mapping[str, object]) -> Results:
        """Return name -> result, without results that are None.

        A result named in ``outputs`` is copied into the caller's tensor or array. The other results are numpy arrays if
        all inputs are numpy arrays or numbers, else tensors. Raises ArtifactInputError if a result has other sizes or
        another dtype than the tensor or array in ``outputs``, or if numpy lacks the dtype.
        """
        named: Results = {}
        for (name, port), result in zip(stage.results, results, strict=True):
            if port is None or not isinstance(result, torch.Tensor):
                if result is not None:
                    named[name] = result
            elif name in outputs:
                named[name] = outputs[name]
                _write_into(port, outputs[name], result)
            else:
                named[name] = _numpy_of(port, result) if self._gives_numpy else result
        return named


def _tensor_of(port: Port, value: object) -> object:
    """Return an input in the form that the graph takes. A numpy array becomes a tensor that shares the array's memory.

    The array is copied only if it is read-only or has negative strides, or if the graph reads the input on another
    device. Raises ArtifactInputError for a value that is no array, for a dtype that torch lacks, and for an array that
    would be copied although the graph writes the input.
    """
    if port.number or isinstance(value, torch.Tensor):
        return value
    array = _from_numpy(port, value)
    tensor = array.to(port.device)
    if port.written and tensor is not array:  # the array would not get the graph's writes
        raise ArtifactInputError(name=port.name, expected=f"{port}, to be written", given="a numpy array")
    return tensor


def _from_numpy(port: Port, value: object) -> torch.Tensor:
    array = array_of(value)
    if array is None or isinstance(value, numpy.ma.MaskedArray):  # a tensor has no mask
        raise ArtifactInputError(name=port.name, expected=port, given=shown(value))
    if port.written and not torch_may_use(array):
        expected = f"{port}, to be written"
        raise ArtifactInputError(name=port.name, expected=expected, given="a read-only array")
    try:
        return tensor_of(array)
    except (TypeError, ValueError) as cause:
        advice = " in another byte order: pass array.astype(array.dtype.type)"
        kind = f"an array of {array.dtype}{'' if array.dtype.isnative else advice}"
        raise ArtifactInputError(name=port.name, expected=port, given=kind) from cause


def _numpy_of(port: Port, tensor: torch.Tensor) -> Array:
    try:
        return tensor.detach().cpu().numpy()
    except TypeError as cause:
        kind = f"a result of {tensor.dtype}, which numpy does not have: pass the inputs as torch tensors"
        raise ArtifactInputError(name=port.name, expected="a dtype of numpy", given=kind) from cause


def check_outputs(interface: Interface, outputs: Mapping[str, object], symbols: Mapping[str, int]) -> None:
    """Check the tensors and arrays that a caller passed for outputs.

    Callers check before the run, because a run may write to a KV cache. A size that only the run determines is checked
    after it. Raises SessionCallError for a name that is no output. Raises ArtifactInputError for a tensor or array that
    cannot hold the result.
    """
    ports = {port.name: port for port in interface.outputs}
    for name, target in outputs.items():
        if name not in ports:
            raise SessionCallError(what="output", name=name, detail=f"the outputs are {', '.join(ports)}")
        port, tensor = ports[name], _target(ports[name], target)
        sizes = [None if size is None else size.evaluate(symbols) for size in port.sizes]
        fits = len(sizes) == tensor.dim() and all(
            size in (None, actual) for size, actual in zip(sizes, tensor.shape, strict=True)
        )
        # Results are copied to an array from any device.
        misplaced = tensor is target and tensor.device != port.device
        if not fits or tensor.dtype != port.dtype or misplaced:
            shape = ", ".join("?" if size is None else str(size) for size in sizes)
            expected = f"{port.dtype} [{shape}] on {port.device}"
            raise ArtifactInputError(name=name, expected=expected, given=shown(tensor))


def _write_into(port: Port, target: object, result: torch.Tensor) -> None:
    """Copy a result into a caller's tensor or array. Raises ArtifactInputError if sizes or dtypes differ."""
    tensor = _target(port, target)
    if tensor.shape != result.shape or tensor.dtype != result.dtype:
        raise ArtifactInputError(name=port.name, expected=shown(result), given=shown(tensor))
    if tensor.data_ptr() != result.data_ptr() or tensor.stride() != result.stride():
        tensor.copy_(result)


def _target(port: Port, target: object) -> torch.Tensor:
    if isinstance(target, torch.Tensor) and is_plain(target):
        return target
    if not isinstance(target, numpy.ndarray) or not cast("Array", target).flags.writeable:
        raise ArtifactInputError(name=port.name, expected=f"{port}, to be written", given=shown(target))
    return _from_numpy(port, cast("Array", target))
