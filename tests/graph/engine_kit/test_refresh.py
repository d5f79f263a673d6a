"""Weights that were written unseen are built in again once somebody says so."""

import pytest
import torch
from torch import nn

import dlinfer
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.graph.engine_kit.held_weights import HeldWeights


@pytest.mark.parametrize("of", [lambda model: model, lambda model: list(model.parameters())])
def test_one_element_written_through_data(of):
    model, notes = nn.Linear(300, 200), list[str]()
    run = HeldWeights([0, 1], ["weight", "bias"], lambda weights: lambda *given: weights[0].sum(), notes)
    for _ in range(2):
        run(model.weight, model.bias)
    model.weight.data[7, 11] += 1
    dlinfer.refresh(of(model))
    run(model.weight, model.bias)
    assert (run.builds, notes) == (2, ["compiled again because weights changed: weight, bias"])


def test_weights_that_torch_does_not_count():
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(UnsupportedFeatureError, match="inference_mode"):
        dlinfer.refresh(model)
