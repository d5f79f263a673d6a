"""Run a function as an OpenVINO model: bind inputs, run it, and write new contents back.

If the model would be wrong for a call, torch runs the call, under the fallback policy. That happens for inputs or
intermediate integers of more than 32 bits, which the plugin cuts, and for indices out of range. Some of these cases
only the model can detect. Its last outputs are bools, one for each such case; if one is true, the model's results are
dropped."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import openvino as ov
import torch
from torch import Tensor

from dlinfer.graph.engine_kit.empty_operands import EmptyOperands
from dlinfer.graph.engine_kit.output_sizes import reader
from dlinfer.graph.engine_kit.refused import RefusedError, WrongInputError
from dlinfer.graph.engine_kit.value_region import Executable, Lowered
from dlinfer.graph.functional.functionalize import Function
from dlinfer.vendor.openvino.builder import INDEX
from dlinfer.vendor.openvino.devices import core, properties
from dlinfer.vendor.openvino.dtypes import KEPT
from dlinfer.vendor.openvino.int_ranges.kept import Interval, range_of
from dlinfer.vendor.openvino.options import OpenVINOOptions
from dlinfer.vendor.openvino.registry import Call, not_empty
from dlinfer.vendor.openvino.requests import Requests
from dlinfer.vendor.openvino.template import OUTPUT, Result, Template
from dlinfer.vendor.openvino.weights import with_weights
from dlinfer.vendor.openvino.workarounds.precision import rounded


class OpenVINOLowered(Lowered):
    """A model that can be compiled.

    The inputs in ``held`` are weights, which become constants of the compiled model.
    """

    placement = "kernel OpenVINO"

    def __init__(self, function: Function, template: Template, options: OpenVINOOptions) -> None:
        super().__init__(function, template.held)
        self.template = template
        self.notes = template.notes
        self.source = f"OpenVINO model {template.model.get_friendly_name()}\n"
        self._options = options
        held = set(template.held)
        indices = {index for index, _, _ in template.limits}
        self._bound = [index for index, name in enumerate(template.inputs) if name and index not in held]
        kept = (result.target for result in template.results if result.kind == "kept")
        self._kept = [target for target in kept if target is not None]
        self._int64 = [index for index in template.int64_inputs if index not in indices]
        self._ranged = {*self._int64, *indices, *template.ranges.inputs}
        self._limits = [(index, negative) for index, _, negative in template.limits]
        self._limit_sizes = reader([[size for _, size, _ in template.limits]])
        self._written = {result.target for result in template.results if result.target is not None}
        self._sizes = reader(template.sizes)
        self._check_empty = EmptyOperands(function.graph_module.graph, lambda node: not_empty(Call.of(node)))
        self._dtypes = [dtype for result in template.results for dtype in _dtypes(result)]
        self._dtypes += [torch.bool] * len(template.faults)

    def compile(self, weights: tuple[Tensor, ...]) -> Executable:
        template, options = self.template, self._options
        by_name = {template.inputs[index]: weight for index, weight in zip(self.held, weights, strict=True)}
        model, keep = with_weights(template.model, by_name, options, template.notes, template.precision)
        hints = properties(options, template.precision, template.cache)
        compiled = self._precise(model, hints)
        requests = Requests(compiled, self._dtypes, (keep, template.keep))
        built_in = zip(self.held, weights, strict=True)
        held = {index: range_of(weight) for index, weight in built_in if index in self._ranged}

        def run(*inputs: Any) -> list[Tensor]:
            self._check_numbers(inputs, held)
            outputs = requests(self._tensors(inputs), self._sizes(inputs))
            for reason, flag in zip(reversed(template.faults), reversed(outputs), strict=False):
                if flag.item():
                    raise WrongInputError(reason) if reason == INDEX else RefusedError(reason)
            return self._contents(inputs, outputs)

        return run

    def _precise(self, model: ov.Model, hints: dict[str, Any]) -> ov.CompiledModel:
        """Compile the model.

        If OpenVINO would round some of its float32 to 16 bits, compile the whole model in float32.
        """
        compiled = self._compiled(model, hints)
        node = self._rounded(compiled)
        if node is None:
            return compiled
        del compiled  # it holds reordered weights
        lost = f"OpenVINO would round the float32 values of {node} to 16 bits, like those of its neighbours"
        if self.template.cache not in ("", "f32"):
            raise RefusedError(f"{lost}, and the KV cache is not float32")
        note = f"{lost}: the whole region is computed in float32"
        if note not in self.notes:  # a changed weight compiles the model again
            self.notes.append(note)
        return self._compiled(model, hints | properties(replace(self._options, precision="f32"), "f32", ""))

    def _compiled(self, model: ov.Model, hints: dict[str, Any]) -> ov.CompiledModel:
        try:
            return core().compile_model(model, self._options.device, hints)
        except RuntimeError as cause:  # the only class that OpenVINO raises
            raise RefusedError(f"OpenVINO cannot compile the region: {_message(cause)}") from cause

    def _rounded(self, compiled: ov.CompiledModel) -> str | None:
        """Return a float32 node that the CPU plugin rounds to 16 bits against the options; None if it rounds none."""
        if self._options.precision != "model" or self._options.device.split(".")[0] != "CPU":
            return None
        return rounded(compiled, self.template.model, self.template.precise)

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise RefusedError for empty operands that OpenVINO gets wrong, and for a non-contiguous KV cache.

        Attention over no keys has such operands. A non-contiguous cache would be copied, and the model would write into
        the copy.
        """
        self._check_empty(inputs)
        if not all(inputs[index].is_contiguous() for index in self._kept):
            raise RefusedError("a KV cache is not contiguous")

    def _check_numbers(self, inputs: Sequence[Any], held: Mapping[int, Interval]) -> None:
        """Raise RefusedError for integers of more than 32 bits. Raise WrongInputError for an index out of range.

        held: intervals of the weights that became constants, by position of the input."""
        intervals = dict(held)

        def interval(index: int) -> Interval:
            if index not in intervals:
                intervals[index] = range_of(inputs[index])
            return intervals[index]

        for index in self._int64:
            if not KEPT.holds(interval(index)):
                raise RefusedError("an input has integers of more than 32 bits, which OpenVINO does not keep")
        if self._limits:
            (sizes,) = self._limit_sizes(inputs)
            for (index, negative), size in zip(self._limits, sizes, strict=True):
                low, high = interval(index)
                if inputs[index].numel() and (high >= size or low < (-size if negative else 0)):
                    raise WrongInputError(INDEX)
        ranges = self.template.ranges
        if (reason := ranges(inputs, {index: interval(index) for index in ranges.inputs})) is not None:
            raise RefusedError(reason)

    def _tensors(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return a contiguous tensor for each parameter of the model; numbers become tensors."""
        numbers = self.template.numbers
        return [
            torch.tensor(inputs[index]) if index in numbers else inputs[index].contiguous()
            for index in self._bound
        ]

    def _contents(self, inputs: Sequence[Any], outputs: list[Tensor]) -> list[Tensor]:
        """Return the function's outputs, and write new rows into the inputs that they belong to."""
        remaining = iter(outputs)
        parts = [
            (result, *(self._part(origin, inputs, remaining, result.target) for origin in _origins(result)))
            for result in self.template.results
        ]
        return [_written(inputs, *part) for part in parts]

    def _part(
        self, origin: int | None, inputs: Sequence[Any], remaining: Iterator[Tensor], target: int | None
    ) -> Tensor | None:
        """Return a tensor that a result needs: the model's next output, an input, or None.

        origin: OUTPUT, the input's position, or None.
        remaining: the model's outputs that no result has taken.
        target: position of the input that the result overwrites; None if the result is a new tensor. An input at
            ``origin`` is copied if the result is a new tensor, or if some result overwrites this input."""
        if origin is None:
            return None
        if origin == OUTPUT:
            return next(remaining)
        value = inputs[origin]
        if target is not None and origin not in self._written:
            return value
        return value.clone(memory_format=torch.contiguous_format)


def _written(inputs: Sequence[Any], result: Result, source: Tensor | None, index: Tensor | None) -> Tensor:
    """Return a result's value: ``source`` for the kind "fresh", else the input ``result.target``.

    For the kind "rows", first write the rows ``source`` into that input, at the places ``index`` along ``result.dim``.
    For the kind "kept", the model has written into that input already.
    """
    if result.target is not None and result.kind != "fresh":
        target = inputs[result.target]
        if source is not None and index is not None:
            with torch.no_grad():
                target.index_copy_(result.dim, index, source)
        return target
    assert source is not None, "a fresh result has a source"
    return source


def _origins(result: Result) -> tuple[int | None, int | None]:
    """Return where a result's ``source`` and ``index`` come from: an input's position, OUTPUT, or None for neither."""
    if result.kind == "rows":
        return result.source, result.index
    return (result.source, None) if result.kind == "fresh" else (None, None)


def _dtypes(result: Result) -> list[torch.dtype]:
    """Return the dtypes of the model outputs that a result takes."""
    kinds = zip(_origins(result), (getattr(torch, result.dtype), torch.int64), strict=True)
    return [dtype for origin, dtype in kinds if origin == OUTPUT]


def _message(cause: RuntimeError) -> str:
    lines = [line.strip() for line in str(cause).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("Exception from"))[:300]
