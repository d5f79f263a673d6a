"""The graph engine: regions as ONNX models, which the evaluator of the package onnx runs until a compiler does."""

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from dlinfer.graph.engine_kit.onnx_engine import OnnxEngine, OnnxModel, Session
from dlinfer.graph.engine_kit.options import EngineOptions
from dlinfer.graph.ir.dialect import tensors_of

from .torch_device import NAME


class TheEngine(OnnxEngine[EngineOptions]):
    """Regions of tensors on the device, and of the host's lengths and positions beside them."""

    name = f"{NAME}_graphs"
    options_type = EngineOptions
    device_type = NAME
    refuses_writes = "it writes into a tensor, but the evaluator only returns new arrays"

    def refuses_tensor(self, tensor: Tensor) -> str | None:
        if tensor.device.type == "cpu" and not tensor.is_floating_point():
            return None
        return super().refuses_tensor(tensor)

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.bfloat16:
            return "bfloat16, which numpy does not have"
        return super().refuses_dtype(dtype)

    def refuses_op(self, node: fx.Node) -> str | None:
        if any(tensor.device.type != NAME for tensor in tensors_of(node)):
            return "its result is on the host"  # ``session`` puts results on the device
        return super().refuses_op(node)

    def fault(self, model: bytes) -> str | None:
        """What the runtime has against the model of a single node; asked once for each kind of node."""
        import onnx
        from onnx.reference import ReferenceEvaluator

        try:
            ReferenceEvaluator(onnx.ModelProto.FromString(model))
        except (NotImplementedError, RuntimeError) as error:
            return f"the evaluator has no such op: {error}"
        return super().fault(model)

    def session(self, model: OnnxModel, options: EngineOptions) -> Session:
        """What runs a model; its weights are in it."""
        import onnx
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(onnx.ModelProto.FromString(model.to_bytes()))

        def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
            given = {name: value.cpu().numpy() for name, value in inputs.items()}
            results = evaluator.run(None, given)
            return [torch.as_tensor(result).to(NAME) for result in results]  # pyright: ignore[reportOptionalIterable]

        return run
