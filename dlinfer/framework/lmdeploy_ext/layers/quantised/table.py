"""The output projection as a packed table, and the tied embedding that reads the same table."""

from typing import Any

import torch
from torch import nn

_TEXT = ("Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Qwen2Moe", "Qwen3Moe")
_VISION = ("Qwen3_5", "Qwen3_5Moe")
CLASSES = frozenset(
    (*(f"{name}ForCausalLM" for name in _TEXT), *(f"{name}ForConditionalGeneration" for name in _VISION))
)
"""LMDeploy's model classes that use ``lm_head`` only for logits. Each was tested with a packed table."""


class Table(nn.Module):
    """Base of a packed table that replaces LMDeploy's layer.

    ``weight`` is an empty tensor of the model's dtype. LMDeploy reads the dtype, and passes the embedding's ``weight``
    to a tied projection.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(0, dtype=dtype)


def why_kept(model: nn.Module) -> str | None:
    """Return a reason not to pack the output projection of an LMDeploy model; None if it can be packed."""
    head: Any = getattr(model, "lm_head", None)
    if type(model).__name__ not in CLASSES or head is None:
        return f"the model is of class {type(model).__name__}"
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    if head.bias is not None:
        return "it has a bias"
    if head.weight.dtype != (getattr(embedding, "out_dtype", None) or embedding.weight.dtype):
        return f"its dtype {str(head.weight.dtype).removeprefix('torch.')} differs from the model's"
    if head.weight.shape != embedding.weight.shape:
        return "it is split over several processes"
    return None


def put(model: Any, head: Table, embedding: Table | None) -> None:
    """Replace a model's output projection by ``head``, and its embedding by ``embedding``. None keeps the embedding."""
    model.lm_head = head
    if embedding is not None:
        getattr(model.model, "language_model", model.model).embed_tokens = embedding
