"""The output projection in int8, and where it is tied to the embedding that too: one table of rows for both.

A decode step reads the whole of it, which in small models with large vocabularies is more than all layers packed. The
table lies as W8A8's weights do: int8 numbers with a float32 scale for each row, a row for each token.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.layers.quantised.eight_bit import LinearW8A8

logger = logging.getLogger("dlinfer")

CLASSES = frozenset(
    f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Qwen2Moe", "Qwen3Moe")
)
"""LMDeploy's classes whose logits are ``lm_head`` of hidden states and nothing else, compared with it packed."""


class _Table(nn.Module):
    """int8 rows with a scale each. ``weight`` stands in for the weight of LMDeploy's layer, which is asked for its
    dtype and handed from the embedding to the projection where they are tied: it holds nothing."""

    def __init__(self, numbers: nn.Parameter, scales: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__()
        self.numbers, self.scales = numbers, scales
        self.weight = torch.empty(0, dtype=dtype)


class PackedHead(_Table):
    """``lm_head`` in int8, its input rounded to int8 by token."""

    def __init__(self, numbers: nn.Parameter, scales: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__(numbers, scales, dtype)
        self.impl = LinearW8A8(dtype, torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] of the model's dtype -> new [..., vocabulary] of it."""
        return self.impl.forward(x, self.numbers, self.scales)


class PackedEmbedding(_Table):
    """The embedding whose rows are those of a ``PackedHead``."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...], whole numbers below the vocabulary's size -> new [..., hidden] of the model's dtype."""
        return (self.numbers[x].to(torch.float32) * self.scales[x]).to(self.weight.dtype)


def pack(model: nn.Module, tied: bool) -> None:
    """Put a packed projection, and where ``tied`` a packed embedding, in the place of a model's, before weights load.

    model: LMDeploy's, its parameters of one device, which take no pages yet. One of another class, with a projection in
    float32 beside a model in 16 bits, or that several processes share, keeps what it has, with a warning where
    DLINFER_CPU_HEAD asks for it. No error: the setting is a process's, which may load a draft of another class too.
    """
    reason = _why_kept(model)
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
    place = {"device": weight.device}
    numbers = nn.Parameter(torch.empty(weight.shape, dtype=torch.int8, **place), requires_grad=False)
    scales = nn.Parameter(torch.empty(len(weight), 1, dtype=torch.float32, **place), requires_grad=False)
    model.lm_head = PackedHead(numbers, scales, weight.dtype)
    if tied:
        inner: Any = model.model
        inner.embed_tokens = PackedEmbedding(numbers, scales, weight.dtype)


def _why_kept(model: nn.Module) -> str | None:
    head: Any = getattr(model, "lm_head", None)
    if type(model).__name__ not in CLASSES or head is None:
        return f"the model is of class {type(model).__name__}"
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    stored = embedding.weight
    given = getattr(embedding, "out_dtype", None) or stored.dtype
    if head.bias is not None:
        return "it has a bias"
    if head.weight.dtype != given:
        return f"it is in {str(head.weight.dtype).removeprefix('torch.')}, and the model is not"
    if head.weight.shape != stored.shape:
        return "several processes share it"
    return None
