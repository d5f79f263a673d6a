"""A function's graph as an .onnx file with its weights in it, as the card's compiler wants it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dlinfer.graph.onnx.export import OnnxGraph

WEIGHTS = "weights.bin"
INLINE_BYTES = 1 << 20
"""Weights up to this size in all stand in the model's own file; ONNX's limit for one file is 2 GiB."""


def hold(graph: OnnxGraph, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Make inputs of a model initialisers without content yet; gives their values. Changes ``graph.model``."""
    body = graph.model.graph
    held = {value.name: value for value in body.inputs if value.name in names}
    for value in held.values():
        body.inputs.remove(value)
    return tuple(held[name] for name in names)


def write(graph: OnnxGraph, weights: Mapping[Any, torch.Tensor], folder: Path) -> Path:
    """Write the model with ``weights`` (value of ``hold`` -> tensor) into ``folder``; gives the path of the .onnx.

    The model keeps no reference to the weights afterwards.
    """
    import onnx_ir

    body = graph.model.graph
    path = folder / "model.onnx"
    for value, weight in weights.items():
        value.const_value = onnx_ir.tensor(weight.contiguous().numpy(), name=value.name)
        body.initializers[value.name] = value
    try:
        size = sum(weight.nbytes for weight in weights.values())
        onnx_ir.save(graph.model, path, external_data=WEIGHTS if size > INLINE_BYTES else None)
    finally:
        for value in weights:
            del body.initializers[value.name]
            value.const_value = None
    return path
