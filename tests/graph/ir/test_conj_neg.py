"""Inputs that torch holds lazily conjugated or negated, at every way into a compiled graph."""

import pytest
import torch
from torch import nn

import dlinfer
from dlinfer.errors import ArtifactInputError, ArtifactStorageError, CaptureError
from dlinfer.graph.bound_call.capture import capture_call
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.ir.conj_neg import is_lazy, lazy_inputs, may_be_lazy, resolved, with_resolved
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.torch_private.dynamo import mark_fixed
from dlinfer.graph.torch_private.fake_mode import fresh_mode
from dlinfer.runtime.artifact.tensor_file import TensorTable

COMPLEX = torch.tensor([1 + 2j, 3 - 4j, -5 + 6j, 0.5 + 0.25j])


def conjugated():
    return COMPLEX.clone().conj()


def negated():
    return COMPLEX.clone().conj().imag


def reads_memory(x):
    return x * 2 + 1


def test_which_tensors_are_lazy():
    values = (COMPLEX, conjugated(), negated(), torch.ones(2), 3)
    assert list(map(is_lazy, values)) == [False, True, True, False, False]
    assert lazy_inputs(values) == (1, 2)
    assert all(not is_lazy(value) for value in with_resolved(values, (1, 2)))
    assert resolved(values[3]) is values[3]
    assert all(map(may_be_lazy, (torch.float32, torch.bfloat16, torch.int64)))
    assert is_lazy(torch._neg_view(torch.ones(2, dtype=torch.bfloat16)))
    assert not may_be_lazy(torch.bool)


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("value", [negated(), conjugated().real, conjugated().imag[::2]])
def test_a_lazy_input_of_torch_compile(value):
    compiled = torch.compile(reads_memory, backend="dlinfer", options={"fallback": "error"})
    torch.testing.assert_close(compiled(value), reads_memory(value))
    torch.testing.assert_close(compiled(value.clone()), reads_memory(value))  # a graph of its own


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("function", [lambda x: x.add_(1), lambda x: (x * 2, x[1:])])
def test_a_lazy_input_that_is_written_or_returned_is_left_to_torch(function):
    refusing = torch.compile(function, backend="dlinfer", options={"fallback": "error"})
    with pytest.raises(CaptureError, match="lazily conjugated or negated"):
        refusing(negated())
    torch._dynamo.reset()
    given = negated()
    torch.testing.assert_close(torch.compile(function, backend="dlinfer")(given), function(negated()))


class Scaled(nn.Module):
    scale: torch.Tensor

    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x * self.scale * 2 + 1


class Derotated(nn.Module):
    """Undoes a rotary embedding: multiplies by the conjugated table."""

    inverse: torch.Tensor
    minus: torch.Tensor

    def __init__(self):
        super().__init__()
        freqs = torch.polar(torch.ones(5, 4), torch.outer(torch.arange(5.0), torch.rand(4)))
        self.register_buffer("inverse", freqs.conj())
        self.register_buffer("minus", freqs.conj().imag)

    def forward(self, x):
        z = torch.view_as_complex(x.view(5, 4, 2)) * self.inverse
        return torch.view_as_real(z).flatten(1), x[:, :4] * self.minus


@pytest.mark.usefixtures("graph_mode")
def test_a_direct_call_takes_weights_and_arguments_of_either_kind():
    x = torch.arange(4.0)
    mark_fixed(x, 0)
    lazy, plain = Scaled(negated()), Scaled(negated().clone())
    for module in (lazy, plain):
        call, result = capture_call(module, {"x": x}, steady=(), options=CompileOptions())
        torch.testing.assert_close(result, module(x))
        for given in (negated(), x, negated().clone()):
            torch.testing.assert_close(call(x=given), module(given))
    plain.scale = negated()
    with pytest.raises(ArtifactInputError, match="scale"):
        call(x=x)


def test_lazy_buffers_of_an_artifact(tmp_path):
    module, x = Derotated().eval(), torch.randn(5, 8)
    artifact = dlinfer.compile(module, (x,))
    artifact.save(tmp_path / "a.dlinfer")
    with dlinfer.load(tmp_path / "a.dlinfer") as session:
        for results in (artifact(x), session.run({"x": x}).values()):
            for result, expected in zip(results, module(x), strict=True):
                torch.testing.assert_close(result, expected)


def test_lazy_inputs_of_an_artifact_and_a_session(tmp_path):
    module = Scaled(torch.arange(4.0))
    artifact = dlinfer.compile(module, (negated(),))
    artifact.save(tmp_path / "a.dlinfer")
    for given in (negated().clone(), negated()):
        torch.testing.assert_close(artifact(given), module(negated()))
    with dlinfer.load(tmp_path / "a.dlinfer") as session:
        torch.testing.assert_close(session.run({"x": negated()})["output"], module(negated()))


def test_a_lazy_buffer_that_is_written_is_refused():
    class Counted(nn.Module):
        seen: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", negated())

        def forward(self, x):
            self.seen.add_(x)
            return self.seen * 2

    with pytest.raises(CaptureError, match="lazily conjugated or negated"):
        dlinfer.compile(Counted(), (torch.ones(4),))


def test_a_lazy_constant_and_a_lazy_weight_in_a_file_are_refused():
    constant, mode = negated(), fresh_mode()
    with pytest.raises(CaptureError, match="is lazily conjugated or negated"):
        trace(lambda x: x + constant, [mode.from_tensor(torch.ones(4))], mode)
    with pytest.raises(ArtifactStorageError, match="lazily conjugated or negated"):
        TensorTable().add(conjugated())
