"""A model's forward that gives the rows of its hidden states that a step reads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dlinfer.framework.lmdeploy_ext.running.graph_output_rows import ForwardOfKeptRows, kept_rows

HIDDEN = torch.randn(1, 6, 4)


class Model(nn.Module):
    """Gives hidden states, and notes by which keywords it was called."""

    def __init__(self, *, in_dict: bool) -> None:
        super().__init__()
        self.in_dict = in_dict
        self.names: set[str] = set()

    def forward(self, **inputs: Any) -> Any:
        self.names = set(inputs)
        return {"hidden_states": HIDDEN, "other": HIDDEN} if self.in_dict else HIDDEN


def step(**more: Any) -> dict[str, Any]:
    metadata = SimpleNamespace(kept_rows=torch.tensor([2, 5]), cu_seqlens_q=torch.tensor([0, 3, 6]))
    ids = torch.zeros(1, 6, dtype=torch.int64)
    return {"input_ids": ids, "position_ids": ids, "past_key_values": [], "attn_metadata": metadata} | more


@pytest.mark.parametrize("in_dict", [False, True], ids=["a tensor", "a dict"])
def test_rows_of_hidden_states(in_dict):
    model = Model(in_dict=in_dict)
    given = ForwardOfKeptRows(model)(**step())
    assert torch.equal(given["hidden_states"] if in_dict else given, HIDDEN[:, [2, 5]])
    assert not in_dict or given["other"] is HIDDEN
    assert model.names == set(step())


def test_what_is_none_is_left_out():
    """ChatGLM passes images on, which are None where there is none."""
    taken = ForwardOfKeptRows.taken(step(images=None, inputs_embeds=None, state_ids=HIDDEN))
    assert taken is not None and set(taken) == set(step()) | {"state_ids"}


def test_a_language_part_that_takes_embeddings_is_told_of_no_ids():
    """InternLM2's requires the argument."""
    model = Model(in_dict=False)
    given = ForwardOfKeptRows(model)(**step(input_ids=None, inputs_embeds=HIDDEN))
    assert torch.equal(given, HIDDEN[:, [2, 5]])
    assert model.names == set(step()) | {"inputs_embeds"}


def test_an_input_that_it_does_not_know():
    assert ForwardOfKeptRows.taken(step(images=HIDDEN)) is None


def test_which_rows():
    metadata = step()["attn_metadata"]
    assert kept_rows(metadata, 6, last_only=True).tolist() == [2, 5]
    assert kept_rows(metadata, 6, last_only=False).tolist() == list(range(6))
