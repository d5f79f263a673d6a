"""Telling engines that weights were written where torch does not count it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dlinfer.errors import UncountedWeightsError


def refresh(model: nn.Module | Iterable[Tensor]) -> None:
    """Let every compiled graph build the weights in again at its next call, after some were written through ``.data``.

    model: a module, compiled or not, whose parameters and buffers were written; or the tensors themselves. Engines
    that read weights where torch has them need none of it.

    Raises UncountedWeightsError for tensors that were made under ``torch.inference_mode``.
    """
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else list(model)
    uncounted = sum(one.is_inference() for one in tensors)
    if uncounted:
        raise UncountedWeightsError(count=uncounted)
    torch.autograd.graph.increment_version(tensors)
