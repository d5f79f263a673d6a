"""Weights: built in on torch's own memory, built in again when they change, compressed on demand."""

import gc

import openvino as ov
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dlinfer
from dlinfer import ops
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.openvino import weights
from dlinfer.vendor.openvino.options import OpenVINOOptions
from dlinfer.vendor.openvino.weights import quantised
from tests.graph.compiling import compiled, last_report

pytestmark = pytest.mark.usefixtures("graph_mode")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 256)
        self.up = nn.Linear(256, 384)
        self.down = nn.Linear(384, 256, bias=False)
        self.register_buffer("scale", torch.rand(256) + 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        x = x + self.down(F.gelu(self.up(x)))
        return F.linear(x, self.embedding.weight)  # tied


def run_of(model, **engine_options):
    return compiled(
        model, engine="openvino", fallback="error", small_regions="engine", engine_options=engine_options
    )


IDS = torch.arange(10).view(2, 5)


def test_a_pooled_buffer_beside_sizes_that_vary():
    """Folded with sizes that it did not know, OpenVINO wrote past the end of its memory and the process died."""

    class Pooled(nn.Module):
        image: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("image", torch.randn(2, 1, 2, 5))

        def forward(self, x):
            image, y = self.image, x + 1
            torch._dynamo.graph_break()  # after which Dynamo takes the buffer for an argument
            return F.max_pool2d(image, 2), y

    model, x = Pooled(), torch.randn(3)
    run = compiled(model, engine="openvino", fallback="error", small_regions="engine", dynamic=True)
    for got, want in zip(run(x), model(x), strict=True):
        assert torch.equal(got, want)


def notes():
    return [note for region in last_report().regions for note in region.notes]


def near(run, model):
    """float32 sums of 256 products, in another order."""
    expected = model(IDS)
    torch.testing.assert_close(run(IDS), expected, rtol=1e-4, atol=2e-6 * float(expected.abs().max()))


def test_changed_weights_are_noticed_and_told():
    model = Model().eval()
    run = run_of(model)
    with torch.no_grad():
        near(run, model)
        assert notes() == []
        model.up.weight.mul_(2)
        near(run, model)
        model.load_state_dict(Model().state_dict())
        near(run, model)
        model.down.weight.data = torch.randn(256, 384)
        near(run, model)
    assert len(notes()) == 3
    assert all(note.startswith("compiled again because weights changed") for note in notes())


WRITES = {
    "an adapter is merged": lambda weight: weight.data.add_(torch.randn(384, 2) @ torch.randn(2, 256)),
    "merged and assigned": lambda weight: setattr(weight, "data", weight.data.add_(torch.randn(384, 256))),
    "loaded": lambda weight: weight.data.copy_(torch.randn(384, 256)),
    "an eighth": lambda weight: weight.data[48:96].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kind", ["model", "int8"])
def test_writes_through_data_are_noticed(write, kind):
    model = Model().eval()
    run = run_of(model, weights=kind)
    with torch.no_grad():
        run(IDS)
        write(model.up.weight)
        again = run(IDS)
        torch._dynamo.reset()
        torch.testing.assert_close(again, run_of(model, weights=kind)(IDS))


def test_a_small_write_through_data_is_noticed_once_it_is_said():
    model = Model().eval()
    run = run_of(model)
    with torch.no_grad():
        run(IDS)
        model.embedding.weight.data[3, :5] += 1
        dlinfer.refresh(model)
        near(run, model)


@pytest.mark.full
def test_memory_stays_alive_while_it_is_used():
    """OpenVINO's constants do not keep shared memory alive."""
    model = Model().eval()
    run = run_of(model)
    with torch.no_grad():
        expected = model(IDS)
        run(IDS)
        for _ in range(3):
            gc.collect()
            torch.randn(1 << 20)
            torch.testing.assert_close(run(IDS), expected, rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_not_contiguous_is_copied_and_said_so():
    model = nn.Linear(64, 48).eval()
    model.weight = nn.Parameter(torch.randn(64, 48).t())
    run = run_of(model)
    x = torch.randn(3, 64)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert any("is copied" in note for note in notes())


@pytest.mark.parametrize(("kind", "largest"), [("int8", 127), ("int4", 7)])
def test_quantised_weights(kind, largest):
    weight = torch.randn(6, 64)
    integers, scales = quantised(weight if kind == "int8" else weight.view(6, 2, 32), largest)
    assert int(integers.abs().max()) == largest
    off = (integers * scales).view(6, 64) - weight
    assert float(off.abs().max()) <= float(scales.max()) / 2 + 1e-6
    assert torch.equal(quantised(torch.zeros(3, 4), largest)[0], torch.zeros(3, 4, dtype=torch.int8))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_compressed_weights(kind):
    model = Model().eval()
    run = run_of(model, weights=kind, group_size=64)
    lossy = Model().eval()
    lossy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for linear in (lossy.up, lossy.down):
            linear.weight.copy_(_rounded(linear.weight, kind))
        rounded = _rounded(model.embedding.weight, kind)
        hidden = lossy.embedding(IDS) * lossy.scale
        hidden = hidden + lossy.down(F.gelu(lossy.up(hidden)))
        expected = F.linear(
            hidden, rounded
        )  # the tied table is read whole, but compressed where it is a weight
        # Sums of float32 and of what was rounded, in another order.
        torch.testing.assert_close(run(IDS), expected, rtol=1e-3, atol=1e-3)
        off = (run(IDS) - model(IDS)).norm() / model(IDS).norm()
        assert 0 < off < {"int8": 0.02, "int4": 0.2}[kind]


def _rounded(weight, kind):
    shape = (weight.shape[0], -1, 64) if kind == "int4" else weight.shape
    integers, scales = quantised(weight.reshape(shape), 7 if kind == "int4" else 127)
    return (integers * scales).reshape(weight.shape)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_weight_is_widened_a_few_rows_at_a_time(kind, monkeypatch):
    whole, few_rows = [], []
    weight = torch.randn(37, 128).bfloat16()
    options = OpenVINOOptions(weights=kind, group_size=32)
    weights.compressed(weight, options, whole)
    monkeypatch.setattr(weights, "_WIDENED_NUMBERS", 5 * 128)
    weights.compressed(weight, options, few_rows)
    assert len(whole) == len(few_rows) == 2
    for one, other in zip(whole, few_rows, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)
    assert whole[0].nbytes == weight.numel() // (1 if kind == "int8" else 2)


def test_rows_that_the_group_size_does_not_divide_keep_8_bits():
    model = nn.Linear(100, 40).eval()
    run = run_of(model, weights="int4", group_size=64)
    x = torch.randn(3, 100)
    integers, scales = quantised(model.weight, 127)
    with torch.no_grad():
        expected = F.linear(x, integers * scales, model.bias)
        torch.testing.assert_close(run(x), expected, rtol=1e-3, atol=1e-3)
    assert OpenVINOOptions().weights == "model"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_weight_with_what_is_no_number_is_not_compressed(kind):
    model = nn.Linear(64, 40).eval()
    with torch.no_grad():
        model.weight[3, 5], model.weight[7, 11] = torch.nan, torch.inf
        run = run_of(model, weights=kind, group_size=32)
        x = torch.randn(3, 64)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert any("not compressed" in note for note in notes())


def test_weights_too_small_for_a_normal_scale_are_finite():
    flushing = bool(torch.tensor([1e-40]) * 1 == 0)  # asked now: once they are flushed, each is equal to 0
    assert torch.set_flush_denormal(True)
    try:
        integers, scales = quantised(torch.tensor([[0.0, 0.0], [1e-38, -1e-38]]), 127)
        assert (integers * scales).isfinite().all()
        assert scales.min() >= torch.finfo(torch.float32).tiny
    finally:
        torch.set_flush_denormal(flushing)


class Packed(nn.Module):
    """Two layers of the same packed numbers, of which one has no zero points."""

    def __init__(self) -> None:
        super().__init__()
        parts = AWQ.of_groups(64).quantise(torch.randn(256, 600) * 0.1)
        self.qweight, self.scales, self.qzeros = (
            nn.Parameter(part, requires_grad=False) for part in parts if part is not None
        )
        self.bias = nn.Parameter(torch.randn(600).half(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"bias": self.bias, "group_size": 64}
        one = ops.weight_quant_matmul(x, self.qweight, self.scales, offset=self.qzeros, **given)
        return one + ops.weight_quant_matmul(x, self.qweight, self.scales, **given)


def test_packed_weights_become_constants_of_4_bits(monkeypatch):
    made = []
    constant = weights.Constant

    def watched(tensor, *rest):
        if isinstance(tensor, ov.Tensor):
            made.append((tensor.get_element_type().get_type_name(), tuple(tensor.shape)))
        return constant(tensor, *rest)

    monkeypatch.setattr(weights, "Constant", watched)
    model = Packed().eval()
    run, x = run_of(model), torch.randn(5, 256)
    with torch.no_grad():
        # float32 sums of 256 products, in another order; float16 scales do not make it a model in float16
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
        assert made == [("u4", (600, 4, 64)), ("u4", (600, 4, 1)), ("u4", (600, 4, 64))]
        model.qweight.copy_(Packed().qweight)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
        assert len(made) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_not_widened_by_the_plugin(dtype, monkeypatch):
    made = []
    compile_model = ov.Core.compile_model

    def watched(*args):
        made.append(compile_model(*args))
        return made[-1]

    monkeypatch.setattr(ov.Core, "compile_model", watched)
    model, x = Packed().eval(), torch.randn(5, 256, dtype=dtype)
    run = run_of(model)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=2e-2, atol=2e-2)
    infos = [node.get_rt_info() for node in made[-1].get_runtime_model().get_ops()]
    kinds = [info["layerType"].astype(str) for info in infos]
    assert kinds.count("FullyConnected") == 2  # which takes 4 bits; a MatMul takes floats
    assert "MatMul" not in kinds


def test_packed_weights_that_are_inputs():
    def call(x, qweight, scales, qzeros):
        return ops.weight_quant_matmul(x, qweight, scales, offset=qzeros, group_size=64)

    model, x = Packed(), torch.randn(5, 256)
    run = run_of(call)
    with torch.no_grad():
        given = (x, model.qweight.data, model.scales.data, model.qzeros.data)
        torch.testing.assert_close(run(*given), call(*given), rtol=1e-4, atol=1e-4)
