"""Inputs and models that compilers stumble over: the right result, or a clear error of ours; never a wrong number."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dlinfer.errors import CaptureError, EngineUnavailableError, InferenceOnlyError
from dlinfer.graph.report import report
from dlinfer.ops.core.fallback import FallbackWarning
from tests.graph.compiling import (
    StubEngine,
    compiled,
    interpreted_engine,
    same_as_eager,
    use_engine,
)

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture(autouse=True, params=["stub", "inductor, interpreted"])
def engine(request, monkeypatch):
    """Each case goes through the core alone, and through the schedule and the clusters of the engine inductor."""
    chosen = StubEngine() if request.param == "stub" else interpreted_engine(monkeypatch)
    use_engine(monkeypatch, chosen)
    return chosen


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(sizes).numel()).reshape(sizes) % 7 - 3).to(dtype)


def branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1 if x.sum() > 0 else x * 3 - 1


def breaks(x: torch.Tensor) -> torch.Tensor:
    x = x * 2 + 1
    torch._dynamo.graph_break()
    return x.sin() * 3


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 2


@dataclasses.dataclass
class Parts:
    low: torch.Tensor
    high: torch.Tensor | None
    rows: int


def numbers_and_none(x: torch.Tensor) -> tuple[torch.Tensor, None, int, float]:
    return x.amin(0), None, x.shape[0], 0.5


CASES = {
    "control flow by data": (branches, ones(3, 5) + 1),
    "control flow by data, other branch": (branches, -ones(3, 5) - 1),
    "a graph break": (breaks, ones(3, 5)),
    "a custom autograd.Function": (lambda x: Doubled.apply(x + 1) * 3, ones(3, 5)),
    "complex input": (lambda z: (z * 2 + 1j).abs(), torch.complex(ones(3, 4), ones(3, 4))),
    "complex inside": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j) + 1, ones(3, 4, 2)),
    "complex by fft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2) + 1, ones(3, 8)),
    "sparse inside": (lambda x: torch.sparse.mm(x.to_sparse(), x.t()) * 2, ones(3, 5)),
    "not contiguous": (lambda x: x.view(5, 3) * 2 + x.t().t(), ones(3, 5).t()),
    "strided and offset": (lambda x: x.reshape(-1) + 1, ones(8, 6)[1::2, ::3]),
    "expanded": (lambda x: x.reshape(-1) * 2 + 1, ones(1, 5).expand(3, 5)),
    "no elements": (lambda x: (x * 2 + 1, x.sum(0), torch.cat([x, x])), ones(0, 5)),
    "no columns": (lambda x: (F.linear(x, ones(3, 0)), x.mean(-1)), ones(4, 0)),
    "0-d": (lambda x: x * 2 + 1, torch.tensor(3.0)),
    "size 1": (lambda x: x.squeeze(0) * 2 + 1, ones(1, 4)),
    "dict and list": (
        lambda d: {"a": d["x"] * 2, "b": [d["y"][0] + 1, None]},
        {"x": ones(3), "y": [ones(2)]},
    ),
    "scalars and None": (numbers_and_none, ones(3, 5)),
    "nothing but a number": (lambda x: x.shape[0] + 1, ones(3, 5)),
    "no tensor work": (lambda x: x, ones(3)),
    "constants only": (lambda x: torch.arange(5) * 2, ones(3)),
    "cond": (lambda x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x * 2,)), ones(3, 5)),
    "float64": (lambda x: F.layer_norm(x, (5,)).exp() * 2, ones(3, 5, dtype=torch.float64)),
    "float16": (lambda x: F.silu(x + 1) * 2, ones(3, 5, dtype=torch.float16)),
    "bfloat16": (lambda x: F.softmax(x + 1, -1) * 2, ones(3, 5, dtype=torch.bfloat16)),
    "int": (lambda x: (x // 2 * 3) % 5, ones(3, 5, dtype=torch.int64)),
    "uint8": (lambda x: x * 200 + 100, ones(3, 5, dtype=torch.uint8)),
    "bool": (lambda x: (x ^ ~x.t().t()) | (x & x.all(0)), ones(3, 5, dtype=torch.bool)),
    "nan and inf": (lambda x: torch.maximum(x / 0, x * 2).amax(-1) + 1, ones(3, 5)),
}


@pytest.mark.parametrize("case", CASES)
def test_right_results(case):
    function, given = CASES[case]
    same_as_eager(function, given, small_regions="engine")


def test_while_loop():
    def halved(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = torch.tensor(0)
        return torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y / 2), (start, x + 1))

    same_as_eager(halved, ones(3, 5))


def test_dataclasses_in_and_out():
    def grown(parts: Parts) -> Parts:
        return Parts(parts.low * 2 + 1, None if parts.high is None else parts.high * 3 - 1, parts.rows + 1)

    run = compiled(grown)
    for given in (Parts(ones(3, 5), None, 1), Parts(ones(4, 5), ones(2, 2), 7)):
        with torch.no_grad():
            torch.testing.assert_close(dataclasses.asdict(run(given)), dataclasses.asdict(grown(given)))


@pytest.mark.parametrize("number", [torch.tensor(3), torch.tensor(2.5)])
def test_number_read_from_a_tensor_that_is_written_afterwards(number):
    def scaled(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = n.item()
        n.add_(1)
        return (x * k).sin() + k

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        same_as_eager(scaled, ones(3, 5), number, calls=3, small_regions="engine")


def test_sizes_that_depend_on_data():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        same_as_eager(lambda x: (x.sin() + 1)[x > 0] * 2, ones(3, 5), small_regions="engine")


def test_int_argument_of_any_value():
    run = compiled(lambda x, k: (x * k).sin() + k, small_regions="engine")
    x = ones(3, 5)
    for k in (3, -4, 0, 1, 2**40):
        with torch.no_grad():
            torch.testing.assert_close(run(x, k), (x * k).sin() + k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype):
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        same_as_eager(model, ones(3, 5, dtype=dtype))


def test_autocast_inside_the_model():
    def mixed(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            inner = F.linear(x, weight)
        return inner, F.linear(x, weight)

    same_as_eager(mixed, ones(3, 5), ones(4, 5) / 7)


def test_inference_mode_and_its_tensors_afterwards():
    model, x = nn.Linear(5, 4), ones(3, 5)
    run = compiled(model)
    with torch.inference_mode():
        expected, made = model(x), x + 0
        torch.testing.assert_close(run(x), expected)
        torch.testing.assert_close(run(made), expected)
    with torch.no_grad():
        torch.testing.assert_close(run(made), expected)
        torch.testing.assert_close(run(x), expected)


def test_parameters_that_require_grad():
    model, x = nn.Linear(5, 4), ones(3, 5)
    run = compiled(model)
    with pytest.raises(InferenceOnlyError, match=r"torch.no_grad"):
        run(x)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    with pytest.raises(InferenceOnlyError, match="inference only"):
        run(x)


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Embedding(9, 8))

    def forward(self, tokens):
        return self.model(tokens) * 2


@pytest.mark.parametrize(
    "around", [lambda model: model, lambda model: model.forward, lambda model: lambda x: model(x) + 1]
)
def test_the_weight_that_records_gradients_has_its_name_in_the_model(around):
    with pytest.raises(InferenceOnlyError, match=r"recorded for model\.0\.weight\. "):
        compiled(around(Wrapped()))(torch.tensor([1, 2]))
    with pytest.raises(InferenceOnlyError, match=r"recorded for x\. "):
        compiled(lambda x: x * 2)(ones(3).requires_grad_())


def test_gradients_recorded_inside_the_model():
    def recorded(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x * 2

    with torch.no_grad(), pytest.raises(InferenceOnlyError):
        compiled(recorded)(ones(3).requires_grad_())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_that_turns_gradients_off_itself_is_served(mode):
    class Frozen(torch.nn.Linear):
        @mode()
        def forward(self, input):
            return super().forward(input) * 2 + 1

    module, x = Frozen(3, 3), ones(2, 3)
    result = compiled(module, fallback="error")(x)
    torch.testing.assert_close(result, module(x).clone())
    assert not result.requires_grad

    def half(x):
        with mode():
            y = x @ module.weight
        return y.clone() @ module.weight

    with pytest.raises(InferenceOnlyError):
        compiled(half)(x)


def test_gradients_off_inside_the_model():
    @torch.no_grad()
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = ones(3)
    torch.testing.assert_close(compiled(plain)(x), x * 2)


@pytest.mark.parametrize("to_layout", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_input(to_layout):
    def product(s: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(s, y) + 1

    with torch.no_grad():
        given = to_layout(ones(3, 5)), ones(5, 3)
        torch.testing.assert_close(compiled(product)(*given), product(*given))


def test_tensor_subclass_runs_eagerly_with_a_warning_or_is_refused():
    x = TwoTensor(ones(3, 5), ones(3, 5) * 2)
    for policy in ("allow", "warn"):
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FallbackWarning)
            run = compiled(lambda y: y * 2 + 1, fallback=policy)
            torch.testing.assert_close(run(x).b, x.b * 2 + 1)
        told = [str(one.message) for one in caught if one.category is FallbackWarning]
        assert [("TwoTensor" in text, "runs eagerly" in text) for text in told] == [(True, True)] * (
            policy == "warn"
        )
    with torch.no_grad(), pytest.raises(CaptureError, match="an input is a TwoTensor"):
        compiled(lambda y: y * 2 + 1, fallback="error")(x)


def test_tensor_on_a_device_without_an_engine(monkeypatch):
    monkeypatch.undo()
    with torch.no_grad(), pytest.raises(EngineUnavailableError, match="device 'meta'"):
        compiled(lambda x: x * 2)(torch.empty(3, device="meta"))


def test_new_sizes_and_dtypes_give_right_numbers():
    run = compiled(lambda x: F.softmax(x.float() * 2 + 1, -1).sum(0))
    for sizes in ((2, 3), (4, 5), (1, 5), (0, 5), (7, 1), (2, 3, 4)):
        for dtype in (torch.float32, torch.int32):
            x = ones(*sizes, dtype=dtype)
            with torch.no_grad():
                torch.testing.assert_close(run(x), F.softmax(x.float() * 2 + 1, -1).sum(0))


def test_parameters_changed_in_place_and_replaced():
    model, x = nn.Linear(5, 4), ones(3, 5)
    run = compiled(model)
    with torch.no_grad():
        run(x)
        model.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))
        model.weight.data = ones(4, 5) / 3
        torch.testing.assert_close(run(x), model(x))
        model.weight = nn.Parameter(ones(4, 5) / 5)
        torch.testing.assert_close(run(x), model(x))
        model.register_parameter("bias", None)
        torch.testing.assert_close(run(x), model(x))
        model.weight = nn.Parameter((ones(5, 4) / 5).t())
        torch.testing.assert_close(run(x), model(x))
        model.double()
        torch.testing.assert_close(run(x.double()), model(x.double()))
    assert len(report.reports()) >= 3
