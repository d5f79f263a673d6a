"""A model's weights against what is free, when its layers have been made."""

import pytest
import torch
from torch import nn

from dlinfer.errors import ModelMemoryError
from dlinfer.framework.lmdeploy_ext.device import activation, weight_memory
from dlinfer.vendor import DeviceMemory

MIB = 1 << 20


class Model(nn.Module):
    """1 MiB of a layer, and as much each of an embedding and an output projection."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False, device=device)
        self.embed_tokens = nn.Embedding(512, 512, device=device)
        self.lm_head = nn.Linear(512, 512, bias=False, device=device)


@pytest.fixture
def free(monkeypatch):
    """Lets the device have so much memory free, its own or the host's."""

    def free(size: int, shared: bool = True) -> None:
        activation.activate("cpu")
        memory = DeviceMemory(size, size, "a test's", shared=shared)
        monkeypatch.setattr(activation.device(), "memory", lambda: memory)

    return free


def test_a_model_that_fits_is_given(free):
    free(3 * MIB)
    assert isinstance(weight_memory.checked(Model, tied=False), Model)


def test_one_byte_too_many_is_refused_with_figures(free):
    free(3 * MIB - 1)
    with pytest.raises(
        ModelMemoryError, match=r"needs 3\.00 MiB for its weights, but 3\.00 MiB are free.*a test's"
    ):
        weight_memory.checked(Model, tied=False)


def test_a_tied_projection_is_not_counted(free):
    free(2 * MIB)
    assert isinstance(weight_memory.checked(Model, tied=True), Model)


def test_layers_without_memory_and_devices_with_their_own_are_let_through(free):
    free(1)
    assert isinstance(weight_memory.checked(lambda: Model("meta"), tied=False), Model)
    free(1, shared=False)  # its allocator has met the parameters already
    assert isinstance(weight_memory.checked(Model, tied=False), Model)


def test_a_single_weight_that_the_system_refuses_is_told_in_our_words(free):
    free(MIB)
    with pytest.raises(ModelMemoryError, match=r"needs 1048576\.00 GiB for a single weight"):
        weight_memory.checked(lambda: torch.empty(1 << 50, dtype=torch.uint8), tied=False)


def test_other_errors_are_left_as_they_are(free):
    free(MIB)

    def fail() -> None:
        raise RuntimeError("of another kind")

    with pytest.raises(RuntimeError, match="of another kind"):
        weight_memory.checked(fail, tied=False)
