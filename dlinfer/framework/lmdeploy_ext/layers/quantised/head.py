"""The output projection in int8, and where it is tied to the embedding that too: one table of rows for both.

A decode step reads the whole of it, which in small models with large vocabularies is more than all layers packed. The
table lies as W8A8's weights do: int8 numbers with a float32 scale for each row, a row for each token.
"""

import logging
from typing import Any

import torch
from lmdeploy.pytorch.backends.qmodules import LinearW8A8BuildSpec
from torch import Tensor, nn

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.layers.quantised.eight_bit import LinearW8A8
from dlinfer.framework.lmdeploy_ext.layers.quantised.table import CLASSES, Table, put, why_kept

logger = logging.getLogger("dlinfer")


class _Int8(Table):
    """int8 rows with a scale each."""

    def __init__(self, numbers: nn.Parameter, scales: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.numbers, self.scales = numbers, scales


class PackedHead(_Int8):
    """``lm_head`` in int8, its input rounded to int8 by token."""

    def __init__(self, numbers: nn.Parameter, scales: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__(numbers, scales, dtype)
        out_features, in_features = numbers.shape
        self.impl = LinearW8A8(LinearW8A8BuildSpec(in_features, out_features, False, dtype, torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] of the model's dtype -> new [..., vocabulary] of it."""
        return self.impl.forward(x, self.numbers, self.scales)


class PackedEmbedding(_Int8):
    """The embedding whose rows are those of a ``PackedHead``."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...], whole numbers below the vocabulary's size -> new [..., hidden] of the model's dtype."""
        return (self.numbers[x].to(torch.float32) * self.scales[x]).to(self.weight.dtype)


def pack(model: nn.Module, tied: bool) -> None:
    """Put a packed projection, and where ``tied`` a packed embedding, in the place of a model's, before weights load.

    model: LMDeploy's, its parameters of one device, which take no pages yet. One that ``why_kept`` names keeps what it
    has, with a warning where DLINFER_CPU_HEAD asks for it. That is no error: the setting is a process's, which may load
    a draft model of another class too.
    """
    reason = why_kept(model)
    if reason is not None:
        if settings.current().cpu_head == "int8":
            logger.warning(
                "DLINFER_CPU_HEAD=int8 leaves the output projection as it is stored: %s. It packs those of %s.",
                reason,
                ", ".join(sorted(CLASSES)),
            )
        return
    head: Any = model.lm_head
    weight = head.weight
    numbers = nn.Parameter(torch.empty_like(weight, dtype=torch.int8), requires_grad=False)
    scales = nn.Parameter(weight.new_empty(len(weight), 1, dtype=torch.float32), requires_grad=False)
    parts = (numbers, scales, weight.dtype)
    put(model, PackedHead(*parts), PackedEmbedding(*parts) if tied else None)
