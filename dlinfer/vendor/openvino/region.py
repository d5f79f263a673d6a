"""A region as it runs: inputs checked and bound, the model, new contents written back, the region's outputs.

What the model cannot be right for runs eagerly, at this call only and under the fallback policy: 64-bit integers that
the plugin would cut to 32, and written inputs that share memory with others. So do indices outside of what they index,
for which torch raises. Some of this only the model sees: its outputs say so, and what it computed is not used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dlinfer.graph.held_weights import HeldWeights
from dlinfer.graph.output_sizes import reader
from dlinfer.graph.value_memory import overlapping
from dlinfer.graph.values import Function
from dlinfer.vendor.openvino.builder import INDEX
from dlinfer.vendor.openvino.range_rules import HIGHEST, LOWEST
from dlinfer.vendor.openvino.requests import Requests
from dlinfer.vendor.openvino.template import OUTPUT, Template


class Region:
    """Callable with a region's inputs, gives the tuple of its outputs. Threads may call it at once.

    build: compiles the template with the held weights. eager: the region by torch. leave: applies the policy to a call
    that runs so, given the reason.
    """

    def __init__(
        self,
        template: Template,
        function: Function,
        names: Sequence[str],
        build: Callable[[tuple[Tensor, ...]], Requests],
        eager: Callable[..., tuple[Any, ...]],
        leave: Callable[[str], None],
    ) -> None:
        self.template = template
        self._function = function
        self._eager = eager
        self._leave = leave
        self.source = f"OpenVINO model {template.model.get_friendly_name()}\n"
        held = set(template.held)
        self._bound = [index for index, name in enumerate(template.inputs) if name and index not in held]
        self._numbers = numbers = set(template.numbers)
        self._changing = [index for index in range(len(names)) if index not in held and index not in numbers]
        self._apart: list[Any] = []
        self._written = {one.target for one in template.results if one.target is not None}
        self._kept = [one.target for one in template.results if one.kind == "kept" and one.target is not None]
        indices = {index for index, _, _ in template.limits}
        self._int64 = [index for index in template.int64_inputs if index not in indices]
        self._held = held
        self._held_ranges: dict[int, tuple[int, int, tuple[int, int]]] = {}
        self._limits = [(index, negative) for index, _, negative in template.limits]
        self._limit_sizes = reader([[size for _, size, _ in template.limits]])
        self._sizes = reader(template.sizes)
        self._run = HeldWeights(template.held, names, self._built(build), template.notes)

    def _built(self, build: Callable[[tuple[Tensor, ...]], Requests]) -> Callable[..., Callable[..., Any]]:
        def built(weights: tuple[Tensor, ...]) -> Callable[..., list[Tensor]]:
            requests = build(weights)
            return lambda *inputs: requests(self._tensors(inputs), self._sizes(inputs))

        return built

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        reason = self._unfit(inputs)
        if reason is not None:
            self._leave(reason)
            return self._eager(*inputs)
        if self._lost_index(inputs):
            return self._eager(*inputs)  # which raises what torch raises
        self._function.check(inputs)
        outputs = self._run(*inputs)
        for fault, found in zip(reversed(self.template.faults), reversed(outputs), strict=False):
            if found.item():
                if fault != INDEX:
                    self._leave(fault)
                return self._eager(*inputs)
        return self._function.finish(inputs, self._contents(inputs, outputs))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are built in now, which the compiled model holds once more."""
        return self._run.nbytes

    def unbind(self) -> None:
        """Let go of the weights and of the compiled model, which holds them once more; the next call compiles again."""
        self._run.release()

    def _unfit(self, inputs: Sequence[Any]) -> str | None:
        """Why the model would not be right for these inputs."""
        if self._written and (conflict := self._conflict(inputs)) is not None:
            return conflict
        if not all(inputs[index].is_contiguous() for index in self._kept):
            return "a KV cache that is not contiguous"
        found: dict[int, tuple[int, int]] = {}
        for index in self._int64:
            low, high = found[index] = self._range(index, inputs)
            if low < LOWEST or high > HIGHEST:
                return "integers beyond 32 bits, which OpenVINO does not keep"
        ranges = self.template.ranges
        for index in ranges.inputs:
            if index not in found:
                found[index] = self._range(index, inputs)
        return ranges(inputs, found)

    def _range(self, index: int, inputs: Sequence[Any]) -> tuple[int, int]:
        """(smallest, largest) of an input; of a weight it is remembered while that stays the same."""
        tensor = inputs[index]
        if index not in self._held:
            return _range(tensor)
        place, version = tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
        before = self._held_ranges.get(index)
        if before is None or before[:2] != (place, version):
            before = self._held_ranges[index] = (place, version, _range(tensor))
        return before[2]

    def _conflict(self, inputs: Sequence[Any]) -> str | None:
        """Why a written input is not apart from the others; looked up where they lie as at the last call."""
        tensors = [inputs[index] for index in self._changing]
        places = [(one.data_ptr(), one.shape, one.stride()) for one in tensors]
        if places == self._apart:
            return None
        given: list[Any] = [None] * len(inputs)
        for index, one in zip(self._changing, tensors, strict=True):
            given[index] = one
        conflict = overlapping(given, self._written)
        if conflict is None:
            self._apart = places
        return conflict

    def _lost_index(self, inputs: Sequence[Any]) -> bool:
        """Whether an input has indices outside of what it indexes."""
        if not self._limits:
            return False
        (sizes,) = self._limit_sizes(inputs)
        for (index, negative), size in zip(self._limits, sizes, strict=True):
            low, high = _range(inputs[index])
            if inputs[index].numel() and (high >= size or low < (-size if negative else 0)):
                return True
        return False

    def _tensors(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The tensors of the model's parameters: numbers as tensors, everything contiguous."""
        return [
            torch.tensor(inputs[index]) if index in self._numbers else inputs[index].contiguous()
            for index in self._bound
        ]

    def _contents(self, inputs: Sequence[Any], outputs: list[Tensor]) -> list[Tensor]:
        """The function's values; new contents of inputs are written into their own memory."""
        given = iter(outputs)
        values: list[Tensor] = []
        with torch.no_grad():
            for result in self.template.results:
                target = None if result.target is None else inputs[result.target]
                if result.kind == "rows":
                    source = next(given) if result.source == OUTPUT else inputs[result.source]
                    index = next(given) if result.index == OUTPUT else inputs[result.index]
                    assert target is not None, "rows go into an input"
                    values.append(target.index_copy_(result.dim, index, source))
                elif result.kind == "fresh":
                    value = next(given) if result.source == OUTPUT else inputs[result.source]
                    if target is not None:
                        value = target.copy_(value)
                    elif result.source != OUTPUT:
                        value = value.clone(memory_format=torch.contiguous_format)
                    values.append(value)
                else:
                    assert target is not None, "what is no result of its own was written into an input"
                    values.append(target)
        return values


def _range(tensor: Tensor) -> tuple[int, int]:
    """(smallest, largest) of whole numbers or bools; zeros where there are none."""
    if not tensor.numel():
        return 0, 0
    if tensor.dtype is torch.bool:
        return 0, 1
    low, high = torch.aminmax(tensor)
    return int(low), int(high)
