"""Wraps a forward so that its graph returns only the hidden states that are read.

These are mostly the hidden states of a prompt's last token. The wrapper selects their rows at the graph's end. The
graph pass ``passes/hoist_row_selection`` then moves the selection before the matrix products of the last layer.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class ForwardOfKeptRows(nn.Module):
    """Calls a model's forward, and returns only those rows of its hidden states that the step needs."""

    def __init__(self, model: Callable[..., Any]) -> None:
        """Wrap an LMDeploy model, or a callable that runs the forward of a model or of its language part."""
        super().__init__()
        self.model = model

    @staticmethod
    def taken(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the keyword arguments of a step that are not None; or None if ``forward`` cannot take all of them."""
        present = {name: value for name, value in inputs.items() if value is not None}
        return present if present.keys() <= _names() else None

    def forward(
        self,
        position_ids: Tensor,
        past_key_values: list[list[Tensor]],
        attn_metadata: Any,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        mrope_position_ids: Tensor | None = None,
        target_hidden_states: Tensor | None = None,
        state_ids: Tensor | None = None,
    ) -> Any:
        """Return the model's result, with its hidden states [1, N, H] cut to the rows ``attn_metadata.kept_rows``."""
        further = {
            "inputs_embeds": inputs_embeds,
            "mrope_position_ids": mrope_position_ids,
            "target_hidden_states": target_hidden_states,
            "state_ids": state_ids,
        }
        result = self.model(
            input_ids=input_ids,  # some models require it next to embeddings
            position_ids=position_ids,
            past_key_values=past_key_values,
            attn_metadata=attn_metadata,
            **{name: value for name, value in further.items() if value is not None},
        )
        kept = attn_metadata.kept_rows
        if isinstance(result, dict):
            return result | {"hidden_states": result["hidden_states"].index_select(1, kept)}
        return result.index_select(1, kept)


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(inspect.signature(ForwardOfKeptRows.forward).parameters)


def kept_rows(metadata: Any, tokens: int, *, last_only: bool) -> Tensor:
    """Return the indices of the tokens whose hidden states a step needs.

    They are int64 [sequences], the last token of each sequence, if ``last_only``; else int64 [tokens], all tokens.
    metadata: the step's StepMetadata. The result is on the device of the metadata's tensors.
    """
    ends = metadata.cu_seqlens_q
    return ends[1:].long() - 1 if last_only else torch.arange(tokens, device=ends.device)
