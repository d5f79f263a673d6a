"""The output projection and a tied embedding, packed to int8 while they load, where the model has such layers."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import floats
from dlinfer.framework.lmdeploy_ext.conversion.formats import W8A8

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"


def packed(weights: Iterable[tuple[str, Tensor]], model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, those of layers that a model has packed as it has them; a tied projection is left out.

    Raises UnsupportedFeatureError for numbers that are not finite.
    """
    tables = {f"{one}.weight": one for one in (_EMBEDDING, _HEAD) if f"{one}.numbers" in _names(model)}
    for name, tensor in weights:
        owner = tables.get(name)
        if owner is not None:
            parts = floats.packed("DLINFER_CPU_HEAD=int8", W8A8(), name, tensor)
            yield f"{owner}.numbers", parts["weight"]
            yield f"{owner}.scales", parts["scale"]
        elif name != f"{_HEAD}.weight" or not tables:
            yield name, tensor


def _names(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}
