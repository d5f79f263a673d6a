"""What is computed of weights alone is the same at each call."""

import openvino as ov
import openvino.opset16 as op
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dlinfer
from dlinfer.vendor.openvino.workarounds.constants import part_constants, write_absolutes
from tests.graph.compiling import compiled

pytestmark = pytest.mark.usefixtures("graph_mode")

OF_WEIGHTS = {
    "mish": F.mish,
    "normalised": lambda weight: F.rms_norm(F.mish(weight), weight.shape[-1:]),
    "product": lambda weight: F.mish(weight) @ torch.eye(weight.shape[-1]),
    "running sum": lambda weight: weight.cumsum(1),
    "rolled": lambda weight: weight.roll(1, 0),
    "sum": lambda weight: F.mish(weight).sum(1, keepdim=True),
    "largest": lambda weight: F.mish(weight).topk(2, 1)[0].sum(),
}


class Times(nn.Module):
    def __init__(self, of_weights, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.of_weights = of_weights
        self.weight = nn.Parameter(torch.rand(shape) + 1, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_weights(self.weight) * x


@pytest.mark.parametrize("shape", [(1, 2), (2, 64)])
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_it_is_not_overwritten(name, shape):
    model = Times(OF_WEIGHTS[name], shape)
    run = compiled(model, engine="openvino", fallback="error", small_regions="engine")
    with torch.no_grad():
        for x in (torch.full((1,), 2.0), torch.full((1,), 3.0), torch.full((1,), 2.0)):
            torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (2, 64)])
def test_infinities_of_bfloat16_are_not_overwritten(shape):
    model = Times(lambda weight: weight, shape)
    model.weight = nn.Parameter(torch.full(shape, torch.inf, dtype=torch.bfloat16), requires_grad=False)
    run = compiled(model, engine="openvino", fallback="error", small_regions="engine")
    with torch.no_grad():
        for x in (torch.tensor(-1, dtype=torch.bfloat16), torch.tensor(2, dtype=torch.bfloat16)):
            for _ in range(2):
                torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32]
)
def test_absolute_values_of_weights(dtype):
    class Module(nn.Module):
        weight: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.tensor([-3, -1, 0, 2], dtype=dtype))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            wide = self.weight.to(torch.int64 if not dtype.is_floating_point else torch.float32)
            return (
                self.weight.abs() + x.to(dtype),
                wide.abs() * x.to(wide.dtype),
                torch.fmod(x.to(torch.int64), wide - 7),
            )

    model = Module()
    run = compiled(model, engine="openvino", fallback="allow", small_regions="engine")
    for x in (torch.tensor([0, 1, -2, 5]), torch.tensor([3, 0, 9, -20])):
        torch.testing.assert_close(run(x), model(x))


def test_absolute_values_are_wrong_without_the_workaround():
    x = op.parameter([1], ov.Type.f32)
    wide = op.convert(op.constant([-2.5], ov.Type.f16), ov.Type.f32)
    model = ov.Model([op.multiply(op.abs(wide), x)], [x])  # pyright: ignore[reportGeneralTypeIssues]
    given = [torch.ones(1).numpy()]
    assert ov.Core().compile_model(model, "CPU")(given)[0][0] == -2.5, (
        "OpenVINO is right now: write_absolutes can go"
    )
    write_absolutes(model)
    assert ov.Core().compile_model(model, "CPU")(given)[0][0] == 2.5


def test_an_argument_may_have_any_name():
    class Named(nn.Module):
        def forward(self, nowhere: torch.Tensor) -> torch.Tensor:
            return nowhere * 2

    x = torch.randn(3)
    torch.testing.assert_close(dlinfer.compile(Named(), (x,), engine="openvino")(x), x * 2)


def test_what_can_be_folded_is_left():
    """One plus a weight, as Gemma's norms have it, costs nothing at a call."""
    weight = op.constant([[1.0, 2.0]], ov.Type.f32)
    x = op.parameter([1, 2], ov.Type.f32)
    for made, inputs in ((op.add(weight, op.constant(1.0, ov.Type.f32)), 1), (op.roll(weight, [0], [0]), 2)):
        model = ov.Model([op.multiply(made, x)], [x])  # pyright: ignore[reportGeneralTypeIssues]
        part_constants(model)
        assert len(model.inputs) == inputs


def _aranges():
    a = torch.arange(7)
    return (a[None, :] <= a[:, None])[None, None].expand(2, -1, 7, 7)


def _gathered():
    places, row = torch.arange(7)[None].expand(2, -1), torch.arange(2)[:, None, None, None]
    keys, queries = torch.arange(7)[None, None, None, :], torch.arange(7)[None, None, :, None]
    return places[row, keys] <= places[row, queries]


def _added():
    row = torch.arange(2)[:, None, None, None]
    return (row + torch.arange(7)[None, None, None, :]) <= (row + torch.arange(7)[None, None, :, None])


MASKS = {"aranges": _aranges, "gathered": _gathered, "added": _added}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_is_inverted_is_read_again(name):
    def function(scores):
        mask = MASKS[name]()
        scores = scores.masked_fill(~mask[:, 0], -9.0)
        return mask & (scores > -1)[:, None]

    run = compiled(function, engine="openvino", fallback="error", small_regions="engine")
    for _ in range(3):
        scores = torch.randn(2, 7, 7)
        assert torch.equal(run(scores), function(scores))


def _inverted(weight, scores):
    mask = (F.mish(weight) > 0).expand(2, 1, 7, 7)
    return torch.where(~mask[:, 0], scores, 0.0), mask & (scores > 0)[:, None]


def _negated(weight, scores):
    value = F.mish(weight).expand(2, 1, 7, 7)
    return value[:, 0].abs() * scores, value.flatten(0, 1).neg() - scores, value + scores[:, None]


@pytest.mark.parametrize("function", [_inverted, _negated])
def test_what_is_computed_of_weights_is_read_again(function):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 7), requires_grad=False)

        def forward(self, scores):
            return function(self.weight, scores)

    model = Model()
    run = compiled(model, engine="openvino", fallback="error", small_regions="engine")
    for _ in range(3):
        scores = torch.randn(2, 7, 7)
        for got, wanted in zip(run(scores), model(scores), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


LINEAR_PAIRS = {
    "(x + c) * c": lambda x, c: (x + c) * c,
    "(x - c) * c": lambda x, c: (x - c) * c,
    "(x + inf) * 2": lambda x, c: (x + torch.inf) * 2,
    "(x * c + c) * c": lambda x, c: (x * c + c) * c,
    "(x + 1e30) * 1e30": lambda x, c: (x + 1e30) * 1e30,
    "x + 1e38 + 3e38 - 3e38": lambda x, c: x + 1e38 + 3e38 - 3e38,
    "x * 1e-30 * 1e-30 * 1e30": lambda x, c: x * 1e-30 * 1e-30 * 1e30,
    "x * c / c": lambda x, c: x * c / c,
    "x / c * c": lambda x, c: x / c * c,
    "(x + c) / c": lambda x, c: (x + c) / c,
    "x / c": lambda x, c: x / c,
    "x / 3e38": lambda x, c: x / 3e38,
    "(x @ eye + c) * c": lambda x, c: (x[None] @ torch.eye(len(c)) + c) * c,
    "x @ eye * c": lambda x, c: x[None] @ torch.eye(len(c)) * c,
    "conv(x) * c": lambda x, c: F.conv1d(x[None, :, None], torch.eye(len(c))[..., None]) * c[:, None],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LINEAR_PAIRS)
def test_extreme_constants_of_linear_ops_are_not_combined(name, dynamic):
    class Pair(nn.Module):
        c: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            extreme = [torch.inf, -torch.inf, 2.0, 0.0, torch.nan, 1e38, 3e38, 3e38]
            self.register_buffer("c", torch.tensor(extreme))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return LINEAR_PAIRS[name](x, self.c)

    model = Pair()
    run = compiled(model, engine="openvino", fallback="error", small_regions="engine", dynamic=dynamic)
    x = torch.tensor([1.0, 2.0, -3.0, 4.0, 5.0, -1e38, -2e38, 1e38])
    torch.testing.assert_close(run(x), model(x), equal_nan=True, rtol=1e-5, atol=0)
