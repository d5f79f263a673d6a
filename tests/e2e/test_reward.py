"""Reward models: ``Pipeline.get_reward_score`` against transformers' hidden states and the checkpoint's own head."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.tiny_models.families import REWARD
from tests.e2e.harness import Lab

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

SEQUENCES = [list(range(10, 52)), list(range(100, 220)), [7, 8]]
TOLERANCE = 2e-4
"""As of logits: sums of 64 terms of float32 in another order, behind two layers."""


def score(model: Path, hidden: np.ndarray) -> float:
    """What the head gives for the last token."""
    head = load_file(model / "model.safetensors")
    last = hidden[-1].astype(np.float64)
    if "v_head.weight" in head:
        return float(head["v_head.weight"][0] @ last)
    inner = np.maximum(head["score.0.weight"] @ last + head["score.0.bias"], 0)
    return float(head["score.2.weight"][0] @ inner + head["score.2.bias"][0])


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("family", REWARD)
def test_scores(lab: Lab, family: str, eager: bool) -> None:
    model = lab.model(family)
    hf = lab.reference(model, score=SEQUENCES, hidden=True)
    steps = [
        {"name": "together", "kind": "reward", "sequences": SEQUENCES},
        {"name": "alone", "kind": "reward", "sequences": SEQUENCES[0]},
    ]
    run = lab.engine(model, steps, eager_mode=eager)
    wanted = [score(model, hf[f"hidden_{i}"]) for i in range(len(SEQUENCES))]
    together, alone = np.asarray(run["together"]), np.asarray(run["alone"])
    np.testing.assert_allclose(together, wanted, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(alone, wanted[:1], atol=TOLERANCE, rtol=0)
