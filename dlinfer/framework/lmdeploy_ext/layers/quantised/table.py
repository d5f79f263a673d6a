"""The output projection as a packed table, and where it is tied, the embedding that reads the same table."""

from typing import Any

import torch
from torch import nn

CLASSES = frozenset(
    f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Qwen2Moe", "Qwen3Moe")
)
"""LMDeploy's classes whose logits are ``lm_head`` of hidden states and nothing else, compared with it packed."""


class Table(nn.Module):
    """A packed table in the place of LMDeploy's layer.

    ``weight`` holds nothing. LMDeploy reads its dtype, and hands it from the embedding to a tied projection.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(0, dtype=dtype)


def why_kept(model: nn.Module) -> str | None:
    """Why the projection of an LMDeploy model cannot be packed; None where it can."""
    head: Any = getattr(model, "lm_head", None)
    if type(model).__name__ not in CLASSES or head is None:
        return f"the model is of class {type(model).__name__}"
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    if head.bias is not None:
        return "it has a bias"
    if head.weight.dtype != (getattr(embedding, "out_dtype", None) or embedding.weight.dtype):
        return f"it is in {str(head.weight.dtype).removeprefix('torch.')}, and the model is not"
    if head.weight.shape != embedding.weight.shape:
        return "several processes share it"
    return None


def put(model: Any, head: Table, embedding: Table | None) -> None:
    """Put a packed projection, and a packed embedding unless it is None, in the place of a model's."""
    model.lm_head = head
    if embedding is not None:
        model.model.embed_tokens = embedding
