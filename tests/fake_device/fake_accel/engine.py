"""The fake device's graph engine: a region's function is run node by node, on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dlinfer.graph.engine_kit.options import EngineOptions
from dlinfer.graph.engine_kit.value_engine import ValueEngine
from dlinfer.graph.engine_kit.value_region import Executable, Lowered
from dlinfer.graph.functional.functionalize import Function
from fake_accel.torch_device import NAME


class FakeEngine(ValueEngine[EngineOptions]):
    """Regions of tensors on the fake device, and of the host's lengths and positions beside them."""

    name = "fakegraphs"
    options_type = EngineOptions
    device_type = NAME

    def refuses_op(self, node: fx.Node) -> str | None:
        return None

    def refuses_tensor(self, tensor: Tensor) -> str | None:
        if tensor.device.type == "cpu" and not tensor.is_floating_point():
            return None
        return super().refuses_tensor(tensor)

    def lower(self, function: Function, options: EngineOptions, policy: str) -> Lowered:
        return _OnDevice(function)


class _OnDevice(Lowered):
    """The function's own graph."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self.source = function.graph_module.code

    def compile(self, weights: tuple[Tensor, ...]) -> Executable:
        run = fx.Interpreter(self.function.graph_module).run

        def on_device(*inputs: Any) -> Sequence[Tensor]:
            with torch.no_grad():
                return [value.clone(memory_format=torch.contiguous_format) for value in run(*inputs)]

        return on_device
