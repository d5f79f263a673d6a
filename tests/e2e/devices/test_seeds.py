"""The margins by which seeds are chosen see a close choice of a token and of an expert, and what float16 changes."""

import copy
from typing import Any

import pytest
import torch
import transformers

from examples.tiny_models.families import FAMILIES
from tests.e2e.devices import seeds

PROMPTS = [[17], [5, 9, 301, 44]]


def model(family: str) -> Any:
    torch.manual_seed(3)
    made = getattr(transformers, f"{FAMILIES[family].hf_name}ForCausalLM")
    return made(made.config_class(**FAMILIES[family].config)).eval()


def test_the_gap_of_experts_is_behind_the_last_that_is_chosen() -> None:
    scores = torch.tensor([[1.0, 7.0, 3.0, 5.5], [4.0, 4.25, 9.0, 8.0]])
    assert seeds.expert_gap(scores, 1) == 1.0
    assert seeds.expert_gap(scores, 2) == 2.5


def test_a_margin_is_known_beside_what_float16_changes() -> None:
    exact = model("qwen3_moe")
    rounded = copy.deepcopy(exact).half()
    token, expert = seeds.margins(exact, rounded, PROMPTS, [])
    for margin in (token, expert):
        assert margin.gap > 0
        assert 1e-4 < margin.rounding < 1
        assert margin.quotient == margin.gap / margin.rounding
    same, chosen = seeds.margins(exact, exact, PROMPTS, [])
    assert (same.gap, same.rounding) == (token.gap, 0.0)
    assert (chosen.gap, chosen.rounding) == (expert.gap, 0.0)


def test_experts_and_tokens_that_tie_are_seen() -> None:
    """Two experts, and two rows of the head, with one score each: planted where they are chosen."""
    exact = model("qwen3_moe")
    gate = exact.model.layers[0].mlp.gate
    with torch.no_grad():
        gate.weight[4:] = gate.weight[
            :4
        ]  # each of the best is there twice: third and fourth tie, so choose three
    gate.top_k = exact.config.num_experts_per_tok = 3
    assert seeds.margins(exact, exact, PROMPTS, [])[1].gap == pytest.approx(0, abs=1e-6)
    dense = model("llama")
    with torch.no_grad():
        dense.lm_head.weight[500:] = dense.lm_head.weight[:500]
    token, expert = seeds.margins(dense, dense, PROMPTS, [])
    assert token.gap == pytest.approx(0, abs=1e-6)
    assert expert.gap == float("inf")
