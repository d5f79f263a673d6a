"""Builds the LoRA layers of a model, and loads adapters into them.

Each layer concatenates A of all adapters, and B.T of all adapters. An adapter has as many rows in a layer as its rank
there. If rows are reserved for adapters that are loaded later, every layer has the same number of rows, and an adapter
the same block of rows in all layers. The block is as long as the adapter's highest rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.checks.model.adapters import (
    MAGNITUDES,
    Adapter,
    Layer,
    LoraModule,
    lora_modules,
)
from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.patching import Original, replaces

_NONE = Layer(rank=0, scaling=1.0, inputs=0, outputs=0)


@dataclass(frozen=True)
class Place:
    """An adapter's number in the LoRA layers, and its block of rows if the layers reserve rows."""

    number: int
    start: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + self.rows


def places(adapters: Mapping[str, str]) -> list[Place]:
    """Return the places of the adapters given at start, in the order of their names. adapters: name -> folder."""
    blocks: list[Place] = []
    for number, name in enumerate(sorted(adapters), 1):
        start = blocks[-1].end if blocks else 0
        blocks.append(Place(number, start, Adapter(name, adapters[name]).rows()))
    return blocks


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
    reserved = devices.reserved_rows(activation.active())
    with torch.inference_mode():
        for path, module in lora_modules(model).items():
            layers = [_NONE, *(part.get(path, _NONE) for part in parts), *[_NONE] * reserved]
            if reserved:
                _reserve(_add_layer(model, path, module, layers, dtype, device), places(adapters), reserved)
            elif any(layer.rank for layer in layers):
                _add_layer(model, path, module, layers, dtype, device)
        for number, adapter in enumerate(ordered, 1):
            magnitudes = _copy(model, number, adapter.weights_of(model))
            _rescale(model, number, magnitudes)


def _add_layer(
    model: Any,
    path: str,
    module: LoraModule,
    layers: Sequence[Layer],
    dtype: torch.dtype,
    device: torch.device | None,
) -> Any:
    """Add the LoRA layer of one module, and return it. layers: the part of each adapter, by the adapters' numbers."""
    from lmdeploy.pytorch.nn.linear import LoRA

    linear, columns = module.linear, module.columns()
    ranks = torch.tensor([layer.rank for layer in layers], device=device)
    outputs = columns.stop - columns.start
    rows = int(ranks.sum())
    lora = LoRA(
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
    linear.lora_adapters[_name(path)] = lora
    if any(layer.is_dora for layer in layers):
        # Buffers, because the identity of a stored graph has all buffers of a model.
        lora.register_buffer("gains", torch.zeros(len(layers), outputs, device=device))
        bias = getattr(linear, "bias", None)
        lora.register_buffer("base_bias", None if bias is None else bias[columns].clone())
        info: Any = lora.adapter_info
        info.gains, info.base_bias = lora.gains, lora.base_bias
    return lora


def _reserve(lora: Any, taken: Sequence[Place], reserved: int) -> None:
    """Give a LoRA layer the blocks of rows that all layers have. taken: the places of the adapters given at start."""
    starts = [0, *(place.start for place in taken), *[0] * reserved]
    lora.adapter_info.rank_offsets.copy_(torch.tensor(starts))
    rows = (taken[-1].end if taken else 0) + reserved
    for weight in (lora.lora_A, lora.lora_B):
        # Written, so that the memory is used before LMDeploy gives what is free to the KV cache.
        weight.data = weight.new_empty(rows, weight.shape[1]).zero_()


def move(model: nn.Module, moves: Sequence[tuple[Place, Place]]) -> None:
    """Move adapters' rows in all LoRA layers of a model. No step may run meanwhile.

    moves: (old place, new place), in the order of the rows. No new place lies behind the old one.
    """
    for path, module in lora_modules(model).items():
        lora = module.linear.lora_adapters[_name(path)]
        for old, new in moves:
            if old != new:
                for weight in (lora.lora_A.data, lora.lora_B.data):
                    weight[new.start : new.end] = weight[old.start : old.end].clone()
                lora.adapter_info.rank_offsets[new.number] = new.start


def write(
    model: nn.Module, place: Place, parts: Mapping[str, Layer], weights: Iterable[tuple[str, str, Tensor]]
) -> None:
    """Put an adapter into the reserved rows of all LoRA layers of a model. No step may run meanwhile.

    parts: path -> the adapter's part in a module; in other modules it has rank 0. weights: (path, "A" or "B", tensor).
    """
    for path, module in lora_modules(model).items():
        info, layer = module.linear.lora_adapters[_name(path)].adapter_info, parts.get(path, _NONE)
        info.ranks[place.number] = layer.rank
        info.rank_offsets[place.number] = place.start
        info.scalings[place.number] = layer.scaling
        if (gains := getattr(info, "gains", None)) is not None:
            gains[place.number] = 0  # the number may have been that of a DoRA adapter
    _copy(model, place.number, weights)


def _copy(model: nn.Module, number: int, weights: Iterable[tuple[str, str, Tensor]]) -> dict[str, Tensor]:
    """Copy A and B of an adapter into the rows of adapter ``number``. Return DoRA's magnitudes: path -> tensor."""
    modules = lora_modules(model)
    magnitudes: dict[str, Tensor] = {}
    for path, side, weight in weights:
        lora = modules[path].linear.lora_adapters[_name(path)]
        if side == MAGNITUDES:
            magnitudes[path] = weight
        else:
            getattr(lora, f"weight_loader_{side}")(getattr(lora, f"lora_{side}"), weight, number)
    return magnitudes


def _rescale(model: nn.Module, number: int, magnitudes: Mapping[str, Tensor]) -> None:
    """Apply DoRA's magnitudes to the rows of adapter ``number``, and set its gains.

    DoRA scales row i of W + scaling * B @ A to the length magnitudes[i]. The factors also scale B here. LoRA layers
    multiply the base model's result by the gain, factor - 1, and add that.
    """
    modules = lora_modules(model)
    for path, magnitude in magnitudes.items():
        module = modules[path]
        lora = module.linear.lora_adapters[_name(path)]
        start, rank = (
            int(tensor[number]) for tensor in (lora.adapter_info.rank_offsets, lora.adapter_info.ranks)
        )
        a, b = (weight.data[start : start + rank] for weight in (lora.lora_A, lora.lora_B))
        weight = module.linear.get_unquantized_weight(torch.float32)[module.columns()]
        added = float(lora.adapter_info.scalings[number]) * (b.float().T @ a.float())
        factors = magnitude.float() / torch.linalg.vector_norm(weight + added, dim=1)
        b.mul_(factors)
        lora.gains[number] = factors - 1


def _name(path: str) -> str:
    """Return the name of a module's LoRA layer in LMDeploy's layer."""
    return path.rpartition(".")[2]
