"""sail.EngineLLM: runs the networks of a bmodel by name, on one or more devices. sail calls a network a graph.

The calls are those of sophon-sail's document "sail.EngineLLM". docs/vendors/vendor_documents.md names the test of each
call. docs/vendors/sophgo.md lists dlinfer's choices where the document is silent.
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
    """Return two methods of ``EngineLLM`` that apply ``get``: one to an input, the other to an output.

    what: a name for the result of ``get``, for the methods' docstrings.
    """

    def of_input(self: "EngineLLM", graph_name: str, index: int) -> _Value:
        return get(self._input(graph_name, index))

    def of_output(self: "EngineLLM", graph_name: str, index: int) -> _Value:
        return get(self._output(graph_name, index))

    of_input.__doc__, of_output.__doc__ = (f"Return {what} of an {side}." for side in ("input", "output"))
    return of_input, of_output


def _max_shape(tensor: TensorInfo) -> list[int]:
    """Return the largest size of each dimension over all stages.

    If the stages differ in the number of dimensions, return the shape with the most elements.
    """
    if len({len(shape) for shape in tensor.shapes}) > 1:
        return list(max(tensor.shapes, key=prod))
    return [max(sizes) for sizes in zip(*tensor.shapes, strict=True)]


class EngineLLM:
    """A bmodel that is loaded on devices. There are three forms of the constructor:

    ``EngineLLM(bmodel_path, dev_ids)``: from a file.
    ``EngineLLM(bmodel_bytes, bmodel_size, dev_ids)``: from memory; bmodel_size is the size in bytes.
    ``EngineLLM(bmodel_path, flags, dev_ids)``: from a file, with flags of BMRuntime (``BmrtFlag``).

    Raises SophgoModelError for a damaged bmodel, and for one that needs another chip or more devices.
    Raises SophgoCallError for other bad arguments.
    Raises the errors of the runtime.
    Methods raise SophgoCallError for a graph, index or stage that does not exist.
    """

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
        """The error of the last ``process`` call; None if the call succeeded."""
        return self._last_error

    # --- running

    def process(self, graph_name: str, input: Mapping[int, Tensor], output: Mapping[int, Tensor]) -> int:
        """Run a graph on the device memory of tensors, and wait until it has finished.

        input, output: index -> tensor, for every input and output. Inputs must have the graph's dtypes. They must also
            have the shapes of one stage, unless the graph is dynamic.
        System memory is neither read nor written: call ``sync_s2d`` on inputs before, and ``sync_d2s`` on outputs
        after. Returns 0 for a success, else a number of ``Failure``. A failure raises nothing: it sets ``last_error``
        and is logged.
        """
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
        """Return the compiler's addr_mode for the graph: 0 basic, 1 io_alone, 2 io_tag, 3 io_tag_fuse, 4 io_reloc."""
        return self._network(graph_name).addr_mode

    def get_stage_num(self, graph_name: str) -> int:
        """Return the number of the graph's stages. A stage is a set of shapes that the graph was compiled for."""
        return self._network(graph_name).stage_num

    def get_input_num(self, graph_name: str) -> int:
        """Return the number of the graph's inputs."""
        return len(self._network(graph_name).inputs)

    def get_output_num(self, graph_name: str) -> int:
        """Return the number of the graph's outputs."""
        return len(self._network(graph_name).outputs)

    def get_is_dynamic(self, graph_name: str) -> bool:
        """Return whether the graph also takes smaller shapes than those of its stages."""
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
        """Return index -> tensor for the graph's inputs, on the graph's own memory.

        tensor_name: return only inputs with this name. The dict is empty if the graph's addr_mode is not 1, or if no
            input has the name.
        """
        network = self._network(graph_name)
        return self._own(network, network.inputs, *_name_and_stage(*args, **kwargs))

    def get_input_tensor(self, graph_name: str, index: int, stage: int = 0) -> Tensor | None:
        """Return an input as a tensor on the graph's own memory; None if the graph's addr_mode is not 1."""
        return self._one(graph_name, self._input(graph_name, index), stage)

    @overload
    def get_output_tensors(self, graph_name: str, tensor_name: str, stage: int = 0) -> dict[int, Tensor]: ...
    @overload
    def get_output_tensors(self, graph_name: str, stage: int = 0) -> dict[int, Tensor]: ...
    def get_output_tensors(self, graph_name: str, *args: Any, **kwargs: Any) -> dict[int, Tensor]:
        """Return index -> tensor for the graph's outputs, on the graph's own memory.

        tensor_name: return only outputs with this name. The dict is empty if the graph's addr_mode is not 1, or if no
            output has the name.
        """
        network = self._network(graph_name)
        return self._own(network, network.outputs, *_name_and_stage(*args, **kwargs))

    def get_output_tensor(self, graph_name: str, index: int, stage: int = 0) -> Tensor | None:
        """Return an output as a tensor on the graph's own memory; None if the graph's addr_mode is not 1."""
        return self._one(graph_name, self._output(graph_name, index), stage)

    def get_input_tensors_addrmode0(self, graph_name: str, stage: int = 0) -> dict[int, Tensor]:
        """Return index -> tensor for all inputs, on the memory that the graph has for them in addr_mode 0 or 1.

        In addr_mode 0 this memory is a part of the working memory of all graphs, so the next ``process`` overwrites it.
        Raises SophgoCallError in addr_mode 2 to 4, where an address is only a tag.
        """
        return self._any(graph_name, self._network(graph_name).inputs, stage)

    def get_output_tensors_addrmode0(self, graph_name: str, stage: int = 0) -> dict[int, Tensor]:
        """Return index -> tensor for all outputs, by the rules of ``get_input_tensors_addrmode0``."""
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
    """Return the tensor's name, or None for all tensors, and the stage.

    The arguments are those after a graph's name: a stage, or a name and a stage.
    """
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
