"""Tests of the transformers adaptor on transformers' own classes with tiny configurations."""

import pytest
import torch

from tests.graph.conftest import artifact_folder, graph_mode
from tests.graph.matrix.models import ARCHITECTURES, build

__all__ = ["artifact_folder", "graph_mode"]


@pytest.fixture
def model_of():
    """A model by the name of its architecture, in eval mode."""

    def made(name: str, dtype: torch.dtype = torch.float32):
        return build(next(one for one in ARCHITECTURES if one.name == name)).to(dtype).eval()

    return made
