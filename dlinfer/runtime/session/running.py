"""Stages at work: what a session calls for each run, with weights and memory in place."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dlinfer.errors import ArtifactInputError, SessionCallError
from dlinfer.graph.interface.ports import Port, is_plain, shown
from dlinfer.runtime.artifact.loading import LoadedStage
from dlinfer.runtime.artifact.tensor_file import TensorFile
from dlinfer.runtime.session.io_memory import IoTensors, RuntimeMemory


class RunningStage:
    """A loaded stage with its weights. Called with the inputs in order, it gives the outputs in order.

    lock: what keeps runs apart; ``Session`` sets it.
    """

    def __init__(self, stage: LoadedStage, weights: Sequence[torch.Tensor]) -> None:
        self.interface = stage.plan.interface
        self.loaded = stage
        self.weights = tuple(weights)
        self.lock: Any = contextlib.nullcontext()
        self._names = stage.plan.names
        self._tensors = [index for index, number in enumerate(stage.plan.results) if number is not None]
        self._others = [index for index, number in enumerate(stage.plan.results) if number is None]

    def __call__(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The outputs for bound values: the tensors of ``results``."""
        return self.tensors(self.results(values))

    def results(self, values: Sequence[Any]) -> Sequence[Any]:
        """All that the graph gives for bound values."""
        with self.lock:
            return self.loaded.run(*self.weights, *values)

    def tensors(self, results: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The outputs among ``results``."""
        return [results[index] for index in self._tensors] if self._others else results

    def whole(self, outputs: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Outputs by name with the results that are numbers or text, in the order of the graph."""
        if not self._others:
            return dict(outputs)
        both = dict(outputs) | {self._names[index]: results[index] for index in self._others}
        return {name: both[name] for name in self._names if name is not None and both[name] is not None}


class Weights:
    """The weights of an artifact as its stages use them: read where they lie in the file, or own where written.

    written: numbers that any stage of the session writes. A copy of a memory is one for all stages, however each
    looks at it: one may write a buffer of which another reads a row.
    """

    def __init__(self, tensors: TensorFile, written: frozenset[int]) -> None:
        self._shared = tensors
        self._own = tensors.own(written)

    def of(self, stage: LoadedStage) -> list[torch.Tensor]:
        """Return the weights of a stage."""
        return [
            self._own[number] if number in self._own else self._shared.tensor(number)
            for number in stage.numbers
        ]


class Values:
    """A caller's values as a stage takes them, and results as the caller's kind of array."""

    def __init__(self, running: RunningStage, given: Mapping[str, Any]) -> None:
        """Raises SessionCallError and ArtifactInputError."""
        self.ports = running.interface.inputs
        if not isinstance(given, Mapping):
            raise ArtifactInputError(name="inputs", expected="a dict of name to value", given=shown(given))
        names = [port.name for port in self.ports]
        if set(given) != set(names):
            missing = sorted(set(names) - set(given))
            unknown = sorted(set(given) - set(names), key=str)
            wrong = (missing or unknown)[0]
            detail = f"it takes {', '.join(names)}" if unknown and not missing else "it was not given"
            raise SessionCallError(what="value for input" if missing else "input", name=wrong, detail=detail)
        arrays = [value for value in given.values() if not isinstance(value, int)]
        self.numpy = bool(arrays) and not any(isinstance(value, torch.Tensor) for value in arrays)
        tensors = [tensor_of(port, given[port.name]) for port in self.ports]
        self.bound, symbols = running.interface.bind(tensors)
        self.symbols = dict(zip(running.interface.places, symbols, strict=True))

    def result(self, port: Port, tensor: Any) -> Any:
        """Return a result in the kind of the inputs."""
        return numpy_of(port, tensor) if self.numpy else tensor


def tensor_of(port: Port, value: Any) -> Any:
    """A value of an input, an array as a tensor on its memory. It is copied only where its memory may not be written,
    and where the graph reads a device's memory. Raises ArtifactInputError."""
    if port.number or isinstance(value, torch.Tensor):
        return value
    array = _from_numpy(port, value)
    tensor = array.to(port.device)
    if port.written and tensor is not array:  # what the graph writes would not reach the array
        raise ArtifactInputError(name=port.name, expected=f"{port}, to be written", given="a numpy array")
    return tensor


def _from_numpy(port: Port, value: Any) -> torch.Tensor:
    import numpy

    # A masked array would lose its mask.
    if not isinstance(value, (numpy.ndarray, numpy.generic)) or isinstance(value, numpy.ma.MaskedArray):
        raise ArtifactInputError(name=port.name, expected=port, given=shown(value))
    array: Any = numpy.asarray(value)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        if port.written:
            raise ArtifactInputError(
                name=port.name, expected=f"{port}, to be written", given="a read-only array"
            )
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as cause:  # a dtype that torch lacks, or has in another order of bytes
        order = (
            "" if array.dtype.isnative else ", in another order of bytes: pass array.astype(array.dtype.type)"
        )
        given = f"an array of {array.dtype}{order}"
        raise ArtifactInputError(name=port.name, expected=port, given=given) from cause


def numpy_of(port: Port, tensor: torch.Tensor) -> Any:
    """Return a result as a numpy array on its memory. Raises ArtifactInputError for a dtype that numpy lacks."""
    try:
        return tensor.detach().cpu().numpy()
    except TypeError as cause:
        given = f"a result of {tensor.dtype}, which numpy has not: pass the inputs as torch tensors"
        raise ArtifactInputError(name=port.name, expected="a dtype of numpy", given=given) from cause


def check_target(port: Port, target: Any, symbols: Mapping[str, int]) -> None:
    """Raise ArtifactInputError where a caller's tensor or array cannot take the result of a call with these sizes.

    Asked before the run, so that no cache is written in vain; sizes that only the run tells are left to ``write_into``.
    """
    tensor = _target(port, target)
    wanted = [None if size is None else size.evaluate(symbols) for size in port.sizes]
    fits = len(wanted) == tensor.dim() and all(
        want in (None, size) for want, size in zip(wanted, tensor.shape, strict=True)
    )
    misplaced = tensor is target and tensor.device != port.device  # an array is the host's, and copied into
    if not fits or tensor.dtype != port.dtype or misplaced:
        shape = ", ".join("?" if size is None else str(size) for size in wanted)
        raise ArtifactInputError(
            name=port.name, expected=f"{port.dtype} [{shape}] on {port.device}", given=shown(tensor)
        )


def write_into(port: Port, target: Any, result: torch.Tensor) -> None:
    """Copy a result into a caller's tensor or array. Raises ArtifactInputError where it does not fit."""
    tensor = _target(port, target)
    if tensor.shape != result.shape or tensor.dtype != result.dtype:
        raise ArtifactInputError(name=port.name, expected=shown(result), given=shown(tensor))
    if tensor.data_ptr() != result.data_ptr() or tensor.stride() != result.stride():
        tensor.copy_(result)


def _target(port: Port, target: Any) -> torch.Tensor:
    """A caller's tensor, or an array as one."""
    import numpy

    if isinstance(target, torch.Tensor) and is_plain(target):
        return target
    if not isinstance(target, numpy.ndarray) or not target.flags.writeable:
        raise ArtifactInputError(name=port.name, expected=f"{port}, to be written", given=shown(target))
    return _from_numpy(port, target)


def lock_of(stages: Sequence[LoadedStage], memory: RuntimeMemory, *, shared: bool, owned: bool) -> Any:
    """Return what keeps runs apart; nothing where the engine takes several at once and none writes what others read."""
    alone = shared or owned or not all(stage.concurrent for stage in stages)
    return memory.lock if alone else contextlib.nullcontext()


def into_own(io: IoTensors, outputs: Sequence[Port], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in the session's own tensors."""
    placed: list[torch.Tensor] = []
    for port, result in zip(outputs, results, strict=True):
        target = io.tensor(port, result.shape)
        target.copy_(result)
        placed.append(target)
    return placed
