"""Artifacts of models on the fake device: compiled ahead of time, loaded in a session, run on the device."""

import numpy as np
import pytest
import torch
from fake_accel.torch_device import NAME
from torch import nn

import dlinfer
from dlinfer.errors import ArtifactInputError


class Model(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x).relu()
        self.seen.add_(y.sum(0))
        return y + torch.arange(4, device=x.device)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval().to(NAME)


def test_a_session_runs_where_the_model_was(model, tmp_path):
    x = torch.randn(3, 6)
    path = tmp_path / "model.dlinfer"
    dlinfer.compile(model, (x.to(NAME),)).save(path)
    wanted = model(x.to(NAME)).cpu().detach()
    session = dlinfer.load(path)
    assert {device.type for device in session.devices} == {NAME}
    (name,) = session.run({"x": x.to(NAME)})
    for _ in range(2):
        found = session.run({"x": x.to(NAME)})[name]
        assert found.device.type == NAME
        torch.testing.assert_close(found.cpu(), wanted)
    arrays = session.run({"x": x.numpy()})[name]
    assert isinstance(arrays, np.ndarray)
    torch.testing.assert_close(torch.from_numpy(arrays), wanted)
    into = np.empty_like(arrays)
    session.run({"x": x.numpy()}, outputs={name: into})
    torch.testing.assert_close(torch.from_numpy(into), wanted)
    with pytest.raises(ArtifactInputError, match=NAME):
        session.run({"x": x})
    with pytest.raises(ArtifactInputError, match=NAME):
        session.run({"x": x.to(NAME)}, outputs={name: torch.empty_like(wanted)})


class Counter(nn.Module):
    def forward(self, counts, x):
        counts.add_(x)
        return counts * 2


def test_an_array_is_not_written_in_another_memory(tmp_path):
    path = tmp_path / "counter.dlinfer"
    dlinfer.compile(Counter().eval(), (torch.zeros(3, device=NAME), torch.ones(3, device=NAME))).save(path)
    session = dlinfer.load(path)
    counts = torch.zeros(3, device=NAME)
    session.run({"counts": counts, "x": torch.ones(3, device=NAME)})
    assert counts.tolist() == [1, 1, 1]
    with pytest.raises(ArtifactInputError, match=r"counts.*to be written.*numpy"):
        session.run({"counts": np.zeros(3, "float32"), "x": np.ones(3, "float32")})
