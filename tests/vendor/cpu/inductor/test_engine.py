"""The engine inductor with its code generator: the cases that only compiled code can get wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlinfer.errors import CaptureError, GraphFallbackError, GraphRunError
from dlinfer.graph.ir.layout import laid_out
from dlinfer.vendor.cpu.inductor.engine import InductorEngine
from tests.graph.compiling import compiled, last_report, same_as_eager, use_engine

pytestmark = [pytest.mark.usefixtures("graph_mode"), pytest.mark.slow]
x = torch.arange(24.0).view(4, 6)


def several_results_of_one_value(x):
    a, b = x * 2 + 1, x * 2 + 1
    zeros, ones = torch.zeros(4, 6), torch.ones(4, 6)
    return a, b, a.clone(), x + zeros, x * ones, a + zeros, x.clone()


def written_later(x):
    zeros = torch.zeros(4, 6)
    y, z = x + zeros, x * 2 + 1
    y.view(-1)[3:9] = 5
    w = z + zeros
    w.index_add_(0, torch.tensor([1, 1]), x[:2])
    return x * 2, y.sin(), z + 1, w + 1


def constants(x):
    t = torch.tensor([float(n) for n in range(24)]).view(4, 6)
    u = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    return t + 0, t * 1, u.clone(), t, u, torch.arange(6.0) + 0


@pytest.mark.parametrize("function", [several_results_of_one_value, written_later, constants])
def test_results_never_share_memory_that_eager_keeps_apart(function):
    same_as_eager(function, x, small_regions="engine", calls=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 12)
        self.cache: torch.Tensor
        self.register_buffer("cache", torch.zeros(16, 6))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear(self.norm(x)).chunk(2, -1)
        self.cache.index_copy_(0, position, F.silu(gate) * up)
        return (self.cache[: x.shape[0]] * 2 + x).softmax(-1)


def test_one_program_serves_all_sizes_and_writes_in_place():
    torch.manual_seed(0)
    model = Block()
    ours = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (4, 2, 9, 16):
            given, position = torch.randn(rows, 6), torch.randperm(rows)
            cache = model.cache.clone()
            result = ours(given, position)
            written, model.cache.data = model.cache.clone(), cache
            torch.testing.assert_close(result, model(given, position))
            torch.testing.assert_close(written, model.cache)
            model.cache.data = written
    assert {node.place for node in last_report().nodes} <= {"engine", "view", "size"}


def test_a_wrong_index_is_an_error_and_not_the_end_of_the_process():
    def looks_up(tokens, table):
        return F.embedding(tokens, table).sin() * 2 + 1

    run = compiled(looks_up, small_regions="engine", dynamic=True)
    tokens, table = torch.arange(4000) % 50, torch.randn(50, 8)
    with torch.no_grad():
        torch.testing.assert_close(run(tokens, table), looks_up(tokens, table))
        with pytest.raises(GraphRunError, match=r"embedding.*out of range"):
            run(tokens + 1, table)
        torch.testing.assert_close(run(tokens, table), looks_up(tokens, table))


DIVISIONS = {
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "of a number": lambda a, b: torch.remainder(7, b),
}


@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS)
def test_a_division_of_integers_by_zero_is_an_error(divide):
    def divides(a, b):
        return divide(a, b) * 2 + 1

    run = compiled(divides, small_regions="engine", dynamic=True)
    a, b = torch.arange(4000), torch.arange(4000) + 1
    with torch.no_grad():
        torch.testing.assert_close(run(a, b), divides(a, b))
        with pytest.raises(GraphRunError, match="ZeroDivisionError"):
            run(a, b - 7)


@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS)
def test_a_division_of_integers_by_a_constant_zero_is_an_error(divide):
    if divide is DIVISIONS["of a number"]:
        divide = torch.remainder

    def divides(a):
        return divide(a, 0) * 2 + 1

    with torch.no_grad(), pytest.raises((GraphRunError, CaptureError), match="ZeroDivisionError"):
        compiled(divides, small_regions="engine")(torch.arange(4000))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes(dtype):
    same_as_eager(
        lambda x: (x.abs() + x) * x if x.dtype != torch.bool else (x & ~x) | x,
        (x - 9).to(dtype),
        small_regions="engine",
    )


class Norm(nn.Module):
    """transformers' LlamaRMSNorm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_16_bit_numbers_round_as_eagers_do(dtype):
    # With a sum of squares in another order, as compiled loops take it, some of these differ by a step of bfloat16.
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Norm(64), Norm(64)

        def forward(self, x):
            total = x + F.silu(self.first(x))
            return self.second(total) * 2, total

    torch.manual_seed(0)
    layer, given = Layer().to(dtype), torch.randn(8000, 64).to(dtype)
    with torch.no_grad():
        results, expected = compiled(layer)(given), layer(given)
    assert all(torch.equal(ours, eagers) for ours, eagers in zip(results, expected, strict=True))
    places = {node.op: node.how for node in last_report().nodes if node.place == "engine"}
    assert places["dlinfer.rms_norm"].startswith("kernel native rms_norm")
    assert places["dlinfer.add_rms_norm"].startswith("kernel native add_rms_norm")


@pytest.mark.parametrize("function", [torch.argmax, torch.argmin])
def test_an_index_counts_elements_in_the_tensors_order_not_the_memorys(function):
    x = torch.tensor([[0.3, 1.0, -3.0], [1.3, -0.1, 2.0]])
    run = compiled(lambda x: (function(x.t() * 2), function(x.unfold(0, 2, 1) + 1)))
    assert run(x) == (function(x.t()), function(x.unfold(0, 2, 1)))


def test_placements_name_kernels_and_clusters():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())
    with torch.no_grad():
        compiled(model)(x)
    places = {node.op: node.how for node in last_report().nodes if node.place == "engine"}
    assert places["aten.linear"].startswith("kernel native linear")
    assert places["aten.layer_norm"].startswith("cluster ")
    assert places["aten.layer_norm"] == places["aten.gelu"]


def test_one_cluster_compiled_for_two_ranges_of_sizes_is_right_from_disk(monkeypatch, tmp_path):
    def padded_to_chunks(x):
        return F.pad(x.sin(), (0, 0, 0, -x.shape[0] % 8)).view(-1, 8, 8) * 2 + 1

    for origin in ("compiled", "disk"):
        use_engine(monkeypatch, InductorEngine())
        torch._dynamo.reset()
        run = compiled(padded_to_chunks, dynamic=True, small_regions="engine", cache_dir=str(tmp_path))
        with torch.no_grad():
            for rows in (12, 5, 40):  # 5 rows are one chunk, which needs other loops
                given = torch.randn(rows, 8)
                torch.testing.assert_close(run(given), padded_to_chunks(given))
        assert last_report().regions[0].clusters[0].origin == origin


def test_without_the_kernels_in_c_plus_plus_torchs_run_by_the_policy(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "dlinfer.vendor.cpu.native.why_not", lambda folder=None: "no C++ compiler is installed"
    )
    reason = "the C++ kernels cannot be built: no C++ compiler is installed"
    layers, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).eval(), torch.randn(3, 6)
    with torch.no_grad():
        run = compiled(layers, fallback="allow", cache_dir=str(tmp_path))
        torch.testing.assert_close(run(x), layers(x))
        assert {node.reason for node in last_report().placed("eager")} == {reason}
        with pytest.raises(GraphFallbackError, match=r"aten\.linear.*no C\+\+ compiler is installed"):
            compiled(layers, fallback="error", cache_dir=str(tmp_path))(x)


def test_tensors_on_another_device_are_left_to_torch():
    def function(x, other):
        return x.sin() * 2 + 1, F.linear(other, other) * 2

    ours, theirs = compiled(function, small_regions="engine")(x, torch.ones(3, 4, device="meta"))
    torch.testing.assert_close(ours, x.sin() * 2 + 1)
    assert (theirs.device.type, theirs.shape) == ("meta", (3, 3))
    assert {node.reason for node in last_report().placed("eager")} == {"it uses a tensor on device 'meta'"}


def test_a_cluster_that_inductor_cannot_compile_obeys_the_policy_wherever_it_is_met(monkeypatch, tmp_path):
    def fails(*args):
        raise RuntimeError("no C++ compiler")

    def model(x):
        return (x.sin() + 0.12345).cos()

    monkeypatch.setattr("dlinfer.graph.torch_private.inductor.compile_loops", fails)
    x = torch.randn(3, 7)
    for _ in range(2):  # the second graph meets a cluster that is known
        run = compiled(model, fallback="allow", cache_dir=str(tmp_path))
        torch.testing.assert_close(run(x), model(x))
        reasons = {node.reason for node in last_report().placed("eager")}
        assert reasons == {"inductor: RuntimeError: no C++ compiler"}
    with pytest.raises(GraphFallbackError, match=r"no C\+\+ compiler"):
        compiled(model, fallback="error", cache_dir=str(tmp_path))(x)


IMAGE = torch.arange(2 * 30 * 4.0).view(2, 30, 4).sin()
KERNEL = torch.arange(6 * 4 * 2 * 2.0).view(6, 4, 2, 2).cos()


def convolution(tokens, kernel):
    # Channels lie last. For a single image torch's kernel gives a contiguous result all the same, its fake does not.
    image = tokens.permute(0, 2, 1).reshape(tokens.shape[0], 4, 6, 5)
    y = F.conv2d(image, kernel, stride=2)
    rows = F.layer_norm(y.reshape(tokens.shape[0], 6, -1).permute(0, 2, 1), (6,))
    return rows.contiguous(), (y * 2 + 1).contiguous()


def pooling(tokens, kernel):
    image = tokens.permute(0, 2, 1).reshape(tokens.shape[0], 4, 6, 5)
    y, places = F.max_pool2d(image, 2, return_indices=True)
    return (y.flatten(2).transpose(1, 2).exp() + 1).contiguous(), (places * 2 + 1).contiguous()


@pytest.mark.parametrize("function", [convolution, pooling])
@pytest.mark.parametrize("images", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_loops_read_results_of_kernels_where_they_lie(function, images, dynamic):
    same_as_eager(function, IMAGE[:images], KERNEL, small_regions="engine", dynamic=dynamic)


def test_laid_out_copies_only_what_lies_otherwise():
    channels_last = torch.arange(48.0).view(2, 3, 4, 2).contiguous(memory_format=torch.channels_last)
    order = (0, 2, 3, 1)
    assert laid_out(channels_last, order) is channels_last
    copy = laid_out(channels_last.contiguous(), order)
    assert copy.stride() == channels_last.stride()
    assert torch.equal(copy, channels_last)


def test_attention_under_a_backend_that_is_chosen_later():
    """Its kernels lay their results out in different ways."""
    q, k, v = (torch.randn(2, 8, 4, 16).transpose(1, 2) for _ in range(3))

    def model(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).mul(2).sin()

    run = compiled(model, small_regions="engine")
    with torch.no_grad():
        torch.testing.assert_close(run(q, k, v), model(q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(run(q, k, v), model(q, k, v))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.as_strided((2,), (1,), x.storage_offset() + 1),
        lambda x: x[1:].as_strided((2,), (1,)),
        lambda x: x.reshape(2, 2).as_strided((2,), (1,), 17),
        lambda x: torch.logit(x * 1.1)[1:].as_strided((2,), (1,), 1).abs(),
    ],
)
@pytest.mark.parametrize("dynamic", [True, False])
def test_as_strided_counts_from_the_beginning_of_the_storage(view, dynamic):
    x = (torch.arange(33.0) / 40)[16:20]
    run = compiled(lambda x: torch.logit(view(x)) + x[:2], dynamic=dynamic, small_regions="engine")
    torch.testing.assert_close(run(x), torch.logit(view(x)) + x[:2])
