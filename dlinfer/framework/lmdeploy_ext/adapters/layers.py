"""Builds the LoRA layers of a model, and loads adapters into them.

Each layer concatenates A of all adapters, and B.T of all adapters. An adapter has as many rows in a layer as its rank
there. LMDeploy gives an adapter the same rank and scaling in all layers of one name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dlinfer.framework.lmdeploy_ext.checks.model.adapters import Adapter, Layer, LoraModule, lora_modules
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces

_NONE = Layer(rank=0, scaling=1.0, inputs=0, outputs=0)


@replaces(
    "lmdeploy.pytorch.models.patch:add_adapters",
    why="gives an adapter the same rank in all layers of one name, and ignores use_rslora and patterns of ranks and "
    "alphas",
    when=activation.is_on,
)
def add_adapters(
    original: Original,
    model: Any,
    adapters: Mapping[str, str],
    dtype: torch.dtype = torch.float16,
    device: torch.device | None = None,
) -> None:
    model = model.get_model() if hasattr(model, "get_model") else model
    ordered = [Adapter(name, adapters[name]) for name in sorted(adapters)]  # LMDeploy numbers them so, from 1
    parts = [adapter.layers_of(model) for adapter in ordered]
    with torch.inference_mode():
        for path, module in lora_modules(model).items():
            layers = [_NONE, *(part.get(path, _NONE) for part in parts)]
            if any(layer.rank for layer in layers):
                _add_layer(model, path, module, layers, dtype, device)
        for number, adapter in enumerate(ordered, 1):
            load(model, adapter, number)


def _add_layer(
    model: Any,
    path: str,
    module: LoraModule,
    layers: Sequence[Layer],
    dtype: torch.dtype,
    device: torch.device | None,
) -> None:
    """Add the LoRA layer of one module. layers: the part of each adapter, by the adapters' numbers."""
    from lmdeploy.pytorch.nn.linear import LoRA

    linear, columns = module.linear, module.columns()
    ranks = torch.tensor([layer.rank for layer in layers], device=device)
    outputs = columns.stop - columns.start
    rows = int(ranks.sum())
    linear.lora_adapters[path.rpartition(".")[2]] = LoRA(
        linear.in_features,
        outputs,
        ranks=ranks,
        scalings=torch.tensor([layer.scaling for layer in layers], device=device),
        lora_a=torch.empty(rows, linear.in_features, dtype=dtype, device=device),
        lora_b=torch.empty(rows, outputs, dtype=dtype, device=device),
        base_slice=columns,
        ctx_mgr=model.ctx_mgr,
        colwise=linear.colwise,
        is_tp=linear.is_tp,
        lora_b_spliter=None if module.part is not None else getattr(linear, "weight_spliter_lora_b", None),
    )


def load(model: nn.Module, adapter: Adapter, number: int) -> None:
    """Copy an adapter's weights into the rows that the model's LoRA layers have for adapter ``number``."""
    modules = lora_modules(model)
    for path, side, weight in adapter.weights_of(model):
        lora = modules[path].linear.lora_adapters[path.rpartition(".")[2]]
        weight_loader, parameter = getattr(lora, f"weight_loader_{side}"), getattr(lora, f"lora_{side}")
        weight_loader(parameter, weight, number)
