"""The output projection in int8. An embedding that is tied to it reads the same table.

A decoding step reads the whole projection. In small models with large vocabularies, the unpacked projection can be
larger than all packed layers together. The table has W8A8's layout: for each token a row of int8 numbers and a float32
scale.
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
    """A table of int8 rows, each with a scale."""

    def __init__(self, numbers: nn.Parameter, scales: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.numbers, self.scales = numbers, scales


class PackedHead(_Int8):
    """The output projection (``lm_head``) in int8. Its input is quantised to int8 with a scale for each token."""

    def __init__(self, numbers: nn.Parameter, scales: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__(numbers, scales, dtype)
        out_features, in_features = numbers.shape
        self.impl = LinearW8A8(LinearW8A8BuildSpec(in_features, out_features, False, dtype, torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        """Return a new tensor [..., vocabulary]. x: [..., hidden]. Both have the model's dtype."""
        return self.impl.forward(x, self.numbers, self.scales)


class PackedEmbedding(_Int8):
    """The embedding that shares the table of a ``PackedHead``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a new tensor [..., hidden] of the model's dtype. x: token ids [...]."""
        return (self.numbers[x].to(torch.float32) * self.scales[x]).to(self.weight.dtype)


def pack(model: nn.Module, tied: bool) -> None:
    """Replace a model's output projection by a packed one before weights load; if ``tied``, its embedding as well.

    model: LMDeploy's. Its parameters are on one device, and take no memory yet. If ``why_kept`` returns a reason, the
    model stays unchanged, with a warning if DLINFER_CPU_HEAD asks for int8. This raises no error, because the setting
    is for a whole process, which may also load a draft model of another class.
    """
    reason = why_kept(model)
    if reason is not None:
        if settings.current().cpu_head == "int8":
            logger.warning(
                "DLINFER_CPU_HEAD=int8 has no effect on this output projection: %s. The setting supports %s.",
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
