"""sail.EngineLLM: runs the networks of a bmodel by name, on one or several devices.

The calls are those of sophon-sail's document "sail.EngineLLM". docs/vendors/vendor_documents.md names their tests;
docs/vendors/sophgo.md lists the choices that the document leaves open.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar, overload

from dlinfer.errors import DlinferError
from dlinfer.vendor.sophgo import errors
from dlinfer.vendor.sophgo.runtime.loaded import LoadedModel, NetworkInfo, TensorInfo
from dlinfer.vendor.sophgo.sail.bind import arguments
from dlinfer.vendor.sophgo.sail.checks import is_count, made_by, refuse
from dlinfer.vendor.sophgo.sail.constructors import opened
from dlinfer.vendor.sophgo.sail.tensor import Tensor
from dlinfer.vendor.sophgo.sail.types import Dtype, Failure

_logger = logging.getLogger("dlinfer")
_Value = TypeVar("_Value")

_FAILURES = {
    errors.SophgoTimeoutError: Failure.TIMEOUT,  # before its base class SophgoWorkerError
    errors.SophgoWorkerError: Failure.WORKER,
    errors.SophgoRuntimeError: Failure.RUNTIME,
    errors.SophgoCallError: Failure.ARGUMENT,
}


def _both(get: Callable[[TensorInfo], _Value], what: str):
    """Return two methods of ``EngineLLM``: ``get`` for an input, and for an output. what: ``get``'s result in docs."""

    def of_input(self: "EngineLLM", graph_name: str, index: int) -> _Value:
        return get(self._input(graph_name, index))

    def of_output(self: "EngineLLM", graph_name: str, index: int) -> _Value:
        return get(self._output(graph_name, index))

    of_input.__doc__, of_output.__doc__ = (f"Return {what} of an {side}." for side in ("input", "output"))
    return of_input, of_output


def _max_shape(tensor: TensorInfo) -> list[int]:
    """Return the largest size of each dimension in any stage; if ranks differ, the shape with the most elements."""
    if len({len(shape) for shape in tensor.shapes}) > 1:
        return list(max(tensor.shapes, key=prod))
    return [max(sizes) for sizes in zip(*tensor.shapes, strict=True)]


class EngineLLM:
    """A bmodel on devices.

    ``EngineLLM(bmodel_path, dev_ids)``: from a file.
    ``EngineLLM(bmodel_bytes, bmodel_size, dev_ids)``: from memory; bmodel_size is the size in bytes.
    ``EngineLLM(bmodel_path, flags, dev_ids)``: from a file, with flags of BMRuntime (``BmrtFlag``).

    Raises SophgoModelError for a damaged bmodel, and for one that needs another chip or more devices; SophgoCallError
    for other arguments; and the runtime's errors. Methods raise SophgoCallError for a missing graph, index or stage."""

    @overload
    def __init__(self, bmodel_path: str, dev_ids: Sequence[int]) -> None: ...
    @overload
    def __init__(self, bmodel_bytes: bytes, bmodel_size: int, dev_ids: Sequence[int]) -> None: ...
    @overload
    def __init__(self, bmodel_path: str, flags: int, dev_ids: Sequence[int]) -> None: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._model: LoadedModel = opened(args, kwargs)
        self._last_error: DlinferError | None = None

    @property
    def last_error(self) -> DlinferError | None:
        """The error of the last ``process``; None if it succeeded."""
        return self._last_error

    # --- running

    def process(self, graph_name: str, input: Mapping[int, Tensor], output: Mapping[int, Tensor]) -> int:
        """Run a graph on tensors' device memory and wait until it has finished.

        input, output: index -> tensor, for every index. Inputs need the graph's types and, unless the graph is dynamic,
            the shapes of one stage.
        System memory is neither read nor written: call ``sync_s2d`` on inputs before, ``sync_d2s`` on outputs after.
        Returns 0, or a number of ``Failure``. Raises nothing for a failure: it sets and logs ``last_error``."""
        try:
            inputs, outputs = arguments(self._network(graph_name), input, output)
            self._model.run(graph_name, inputs, outputs)
        except tuple(_FAILURES) as error:
            self._last_error = error
            _logger.error("EngineLLM.process(%r) failed: %s", graph_name, error)
            return next(int(failure) for kind, failure in _FAILURES.items() if isinstance(error, kind))
        self._last_error = None
        return int(Failure.NONE)

    # --- queries

    def get_device_ids(self) -> list[int]:
        return list(self._model.devices)

    def get_graph_names(self) -> list[str]:
        return list(self._model.networks)

    def get_addr_mode(self, graph_name: str) -> int:
        """Return the compiler's addr_mode: 0 basic, 1 io_alone, 2 io_tag, 3 io_tag_fuse, 4 io_reloc."""
        return self._network(graph_name).addr_mode

    def get_stage_num(self, graph_name: str) -> int:
        """Return the number of sets of shapes that the graph was compiled for."""
        return self._network(graph_name).stage_num

    def get_input_num(self, graph_name: str) -> int:
        """Return the number of the graph's inputs."""
        return len(self._network(graph_name).inputs)

    def get_output_num(self, graph_name: str) -> int:
        """Return the number of the graph's outputs."""
        return len(self._network(graph_name).outputs)

    def get_is_dynamic(self, graph_name: str) -> bool:
        """Return whether the graph also takes shapes smaller than its stage's."""
        return self._network(graph_name).is_dynamic

    get_input_name, get_output_name = _both(lambda tensor: tensor.name, "the name")
    get_input_tensor_devid, get_output_tensor_devid = _both(lambda tensor: tensor.device, "the device")
    get_input_max_shape, get_output_max_shape = _both(_max_shape, "the largest sizes, in any stage,")
    get_input_dtype, get_output_dtype = _both(lambda tensor: Dtype(tensor.dtype), "the type of the elements")
    # An integer input's elements are real values times its scale. An integer output's real values are its elements
    # times its scale. The scale is 1.0 for floating point.
    get_input_scale, get_output_scale = _both(lambda tensor: tensor.scale, "the scale")

    def get_input_shape(self, graph_name: str, index: int, stage: int = 0) -> list[int]:
        """Return the shape of an input in a stage."""
        return _shape(graph_name, self._input(graph_name, index), stage)

    def get_output_shape(self, graph_name: str, index: int, stage: int = 0) -> list[int]:
        """Return the shape of an output in a stage."""
        return _shape(graph_name, self._output(graph_name, index), stage)

    # --- tensors on the runtime's memory of a graph

    @overload
    def get_input_tensors(self, graph_name: str, tensor_name: str, stage: int = 0) -> dict[int, Tensor]: ...
    @overload
    def get_input_tensors(self, graph_name: str, stage: int = 0) -> dict[int, Tensor]: ...
    def get_input_tensors(self, graph_name: str, *args: Any, **kwargs: Any) -> dict[int, Tensor]:
        """Return index -> tensor on the graph's own memory, for all inputs or only the inputs named ``tensor_name``.

        The dict is empty if the graph's addr_mode is not 1, or no input has that name."""
        network = self._network(graph_name)
        return self._own(network, network.inputs, *_name_and_stage(*args, **kwargs))

    def get_input_tensor(self, graph_name: str, index: int, stage: int = 0) -> Tensor | None:
        """Return an input on the graph's own memory; None if the graph's addr_mode is not 1."""
        return self._one(graph_name, self._input(graph_name, index), stage)

    @overload
    def get_output_tensors(self, graph_name: str, tensor_name: str, stage: int = 0) -> dict[int, Tensor]: ...
    @overload
    def get_output_tensors(self, graph_name: str, stage: int = 0) -> dict[int, Tensor]: ...
    def get_output_tensors(self, graph_name: str, *args: Any, **kwargs: Any) -> dict[int, Tensor]:
        """Return index -> tensor on the graph's own memory, for all outputs or only the outputs named ``tensor_name``.

        The dict is empty if the graph's addr_mode is not 1, or no output has that name."""
        network = self._network(graph_name)
        return self._own(network, network.outputs, *_name_and_stage(*args, **kwargs))

    def get_output_tensor(self, graph_name: str, index: int, stage: int = 0) -> Tensor | None:
        """Return an output on the graph's own memory; None if the graph's addr_mode is not 1."""
        return self._one(graph_name, self._output(graph_name, index), stage)

    def get_input_tensors_addrmode0(self, graph_name: str, stage: int = 0) -> dict[int, Tensor]:
        """Return index -> tensor for all inputs, on the graph's own memory, in addr_mode 0 or 1.

        In addr_mode 0 this memory is part of the working memory of all graphs: the next ``process`` overwrites it.
        Raises SophgoCallError in addr_mode 2 to 4, where addresses are tags."""
        return self._any(graph_name, self._network(graph_name).inputs, stage)

    def get_output_tensors_addrmode0(self, graph_name: str, stage: int = 0) -> dict[int, Tensor]:
        """Return index -> tensor for all outputs. The same rules hold as for ``get_input_tensors_addrmode0``."""
        return self._any(graph_name, self._network(graph_name).outputs, stage)

    def _own(
        self, network: NetworkInfo, tensors: Sequence[TensorInfo], name: str | None, stage: int
    ) -> dict[int, Tensor]:
        _shape(network.name, tensors[0], stage)
        if network.addr_mode != 1:
            return {}
        return {
            index: self._tensor(network.name, tensor, stage)
            for index, tensor in enumerate(tensors)
            if name in (None, tensor.name)
        }

    def _any(self, graph_name: str, tensors: Sequence[TensorInfo], stage: int) -> dict[int, Tensor]:
        mode = self.get_addr_mode(graph_name)
        if mode not in (0, 1):
            raise refuse("EngineLLM", f"graph {graph_name!r} has addr_mode {mode}, where addresses are tags")
        return {index: self._tensor(graph_name, tensor, stage) for index, tensor in enumerate(tensors)}

    def _one(self, graph_name: str, tensor: TensorInfo, stage: int) -> Tensor | None:
        return self._tensor(graph_name, tensor, stage) if self.get_addr_mode(graph_name) == 1 else None

    def _tensor(self, graph_name: str, tensor: TensorInfo, stage: int) -> Tensor:
        shape = _shape(graph_name, tensor, stage)
        return Tensor.on(self._model.memory(tensor, stage), shape, Dtype(tensor.dtype))

    # --- lookups

    def _network(self, graph_name: str) -> NetworkInfo:
        if not isinstance(graph_name, str) or graph_name not in self._model.networks:
            known = ", ".join(self._model.networks)
            raise refuse("EngineLLM", f"there is no graph {graph_name!r}; the graphs are {known}")
        return self._model.networks[graph_name]

    def _input(self, graph_name: str, index: int) -> TensorInfo:
        return _at(graph_name, self._network(graph_name).inputs, index, "input")

    def _output(self, graph_name: str, index: int) -> TensorInfo:
        return _at(graph_name, self._network(graph_name).outputs, index, "output")


def _at(graph_name: str, tensors: Sequence[TensorInfo], index: int, side: str) -> TensorInfo:
    if not _within(index, len(tensors)):
        raise refuse("EngineLLM", f"graph {graph_name!r} has {side}s 0 to {len(tensors) - 1}, not {index!r}")
    return tensors[index]


def _shape(graph_name: str, tensor: TensorInfo, stage: int) -> list[int]:
    stages = len(tensor.shapes)
    if not _within(stage, stages):
        raise refuse("EngineLLM", f"graph {graph_name!r} has stages 0 to {stages - 1}, not {stage!r}")
    return list(tensor.shapes[stage])


def _within(number: Any, count: int) -> bool:
    return is_count(number) and number < count


def _name_and_stage(*args: Any, **kwargs: Any) -> tuple[str | None, int]:
    """Parse the arguments after a graph's name: stage, or name and stage. Return name (None for all) and stage."""
    form = _named if "tensor_name" in kwargs or (args and isinstance(args[0], str)) else _unnamed
    return made_by(
        form,
        args,
        kwargs,
        "EngineLLM",
        "the arguments are neither (graph, stage) nor (graph, tensor_name, stage)",
    )


def _named(tensor_name: str, stage: int = 0) -> tuple[str | None, int]:
    if not isinstance(tensor_name, str):
        raise refuse("EngineLLM", f"tensor_name {tensor_name!r} is not a str")
    return tensor_name, stage


def _unnamed(stage: int = 0) -> tuple[str | None, int]:
    return None, stage
