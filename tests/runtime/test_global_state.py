"""Artifacts and sessions that are called, or loaded, under other settings of torch than at compile time."""

import pytest
import torch
from torch import nn

import dlinfer
from dlinfer.errors import CaptureError, TorchStateChangedError
from tests.graph.ir.test_global_state import default_dtype


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        return (torch.relu(self.conv(x)) * 2 + 1) / 3


class Noisy(nn.Module):
    def forward(self, x):
        return (x + torch.rand(8, 8)) * 2 + 1


class Halved(nn.Module):
    def forward(self, x):
        return torch.nonzero(x / 2), x / 2


def loaded(artifact, tmp_path):
    artifact.save(tmp_path / "a.dlinfer")
    return dlinfer.load(tmp_path / "a.dlinfer")


def test_autocast_around_a_call_changes_nothing(tmp_path):
    module, x = Convolved().eval(), torch.randn(1, 3, 16, 16)
    artifact = dlinfer.compile(module, (x,))
    with torch.autocast("cpu", dtype=torch.bfloat16), loaded(artifact, tmp_path) as session:
        results = artifact(x), session.run({"x": x})["output"]
    with torch.no_grad():
        for result in results:
            torch.testing.assert_close(result, module(x))


def test_autocast_around_a_compilation_is_refused():
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CaptureError, match="autocast is on around the compilation"),
    ):
        dlinfer.compile(Convolved().eval(), (torch.randn(1, 3, 16, 16),))


def test_a_factory_keeps_its_dtype_under_another_default(tmp_path):
    module, x = Noisy(), torch.zeros(8, 8)
    artifact = dlinfer.compile(module, (x,))
    torch.manual_seed(1)
    expected = module(x)
    with default_dtype(torch.float64), loaded(artifact, tmp_path) as session:
        for call in (lambda: artifact(x), lambda: session.run({"x": x})["output"]):
            torch.manual_seed(1)
            torch.testing.assert_close(call(), expected)


def test_a_graph_that_reads_the_default_dtype_is_refused_under_another(tmp_path):
    module, x = Halved(), torch.arange(6)
    artifact = dlinfer.compile(module, (x,))
    session = loaded(artifact, tmp_path)
    torch.testing.assert_close(session.run({"x": x})["output_1"], module(x)[1])
    with default_dtype(torch.float64):
        for call in (
            lambda: artifact(x),
            lambda: session.run({"x": x}),
            lambda: dlinfer.load(tmp_path / "a.dlinfer").setup(),
        ):
            with pytest.raises(TorchStateChangedError, match="default dtype"):
                call()
    torch.testing.assert_close(artifact(x)[1], module(x)[1])
