"""Loops read memory by the strides of fakes: what kernels give must lie so, whatever the kernel says of it.

The engine's loops are replaced by what looks where its inputs lie, so that no case needs a compiler.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlinfer.vendor.cpu.inductor import clusters
from dlinfer.vendor.cpu.inductor.engine import InductorEngine
from tests.graph.compiling import compiled, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture(autouse=True)
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors that each run of a cluster looked at."""
    looks: list[int] = []

    def looking(graph: fx.GraphModule, fakes: Any, mode: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            tensors = [
                (one, known)
                for one, known in zip(inputs, fakes, strict=True)
                if isinstance(one, torch.Tensor)
            ]
            looks.append(len(tensors))
            for one, known in tensors:
                assert steps(one) == steps(known), "loops would read it by other strides"
            results = graph(*inputs)
            # As compiled loops lay results out.
            wanted = [node.meta["val"] for node in graph.graph.output_node().args[0]]  # pyright: ignore
            return [
                torch.empty_strided(want.shape, want.stride(), dtype=want.dtype).copy_(result)
                for want, result in zip(wanted, results, strict=True)
            ]

        return run

    monkeypatch.setattr(clusters.inductor, "compile_loops", looking)
    use_engine(monkeypatch, InductorEngine())
    return looks


def steps(tensor: torch.Tensor) -> list[int]:
    """The strides that matter: of sizes beyond 1, in a tensor with elements."""
    return [
        int(stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and tensor.numel()
    ]


def views(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A tensor in all the ways that it may lie: as named, in other orders, with gaps, expanded."""
    numbers = torch.arange(1.0, 1.0 + torch.Size(sizes).numel()).div(7).sin()
    tensor = numbers.reshape(sizes).to(dtype)
    found = [tensor]
    for one, other in itertools.combinations(range(len(sizes)), 2):
        found.append(tensor.transpose(one, other).contiguous().transpose(one, other))
    if len(sizes) == 4:
        found.append(tensor.to(memory_format=torch.channels_last))
    found.append(F.pad(tensor, (1, 2))[..., 1:-2])
    found.append(tensor[:1].expand(sizes))
    return found


def behind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Loops behind each result of a function."""

    def run(*args: Any) -> Any:
        results = function(*args)
        results = results if isinstance(results, (tuple, list)) else (results,)
        return tuple(one.mul(2).sin() if one.is_floating_point() else one * 2 + 1 for one in results)

    return run


def agree(function: Callable[..., Any], *args: Any, under: Any = None) -> None:
    """Compile for a call, and compare with eager at it and under another setting of torch's."""
    torch._dynamo.reset()
    run = compiled(behind(function), small_regions="engine", dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(run(*args), behind(function)(*args), rtol=2e-2, atol=2e-2)
        if under is not None:
            with under():
                torch.testing.assert_close(run(*args), behind(function)(*args), rtol=2e-2, atol=2e-2)


BOTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize("first", [BOTH, [SDPBackend.MATH]])
def test_attention_under_every_backend(looked_at, first, dtype):
    sizes = [(2, 4, 8, 16), (1, 1, 8, 16), (2, 4, 1, 16), (2, 4, 0, 16)]
    queries = [q for one in sizes for q in views(*one, dtype=dtype)]
    then = [SDPBackend.MATH] if first is BOTH else BOTH

    def attends(*queries):
        return [F.scaled_dot_product_attention(q, q, q) for q in queries]

    with sdpa_kernel(first):
        agree(attends, *queries, under=lambda: sdpa_kernel(then))
    assert looked_at


MATRICES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((3, 4, 6), (5, 6))),
    "linear of a vector": (F.linear, ((6,), (5, 6))),
    "matmul": (torch.matmul, ((2, 3, 4, 6), (6, 5))),
    "matmul of batches": (torch.matmul, ((2, 3, 4, 6), (2, 3, 6, 5))),
    "matmul of one row": (torch.matmul, ((3, 1, 6), (3, 6, 5))),
    "mm": (torch.mm, ((4, 6), (6, 5))),
    "bmm": (torch.bmm, ((3, 4, 6), (3, 6, 5))),
    "addmm": (torch.addmm, ((4, 5), (4, 6), (6, 5))),
    "baddbmm": (torch.baddbmm, ((3, 4, 5), (3, 4, 6), (3, 6, 5))),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), ((1, 3, 5, 4), (2, 3, 3, 3))),
    "transposed convolution": (F.conv_transpose2d, ((2, 3, 5, 4), (3, 2, 3, 3))),
    "pooling": (lambda x: F.avg_pool2d(x, 2), ((2, 3, 6, 4),)),
    "sort": (torch.sort, ((3, 4, 6),)),
    "top": (lambda x: torch.topk(x, 2), ((3, 4, 6),)),
    "cumsum": (lambda x: torch.cumsum(x, 1), ((3, 4, 6),)),
    "fft": (lambda x: torch.fft.rfft(x, dim=0).abs(), ((4, 3, 6),)),
    "index_select": (lambda x: torch.index_select(x, 1, torch.tensor([1, 0])), ((3, 4, 6),)),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 2], [0, 1]]).t(), w), ((5, 6),)),
    "gather": (lambda x: x.gather(1, torch.zeros(3, 2, 6, dtype=torch.int64)), ((3, 4, 6),)),
    "interpolation": (lambda x: F.interpolate(x, scale_factor=2), ((2, 3, 5, 4),)),
    "group norm": (lambda x: F.group_norm(x, 3), ((2, 3, 5, 4),)),
    "roll": (lambda x: x.roll(1, 1), ((3, 4, 6),)),
    "nonzero": (torch.nonzero, ((3, 4),)),
    "inverse": (lambda x: torch.linalg.inv(x + 9 * torch.eye(4)), ((2, 4, 4),)),
    "svd": (lambda x: torch.linalg.svd(x, full_matrices=False)[1], ((4, 3),)),
    "lu": (lambda x: torch.linalg.lu_factor(x + 9 * torch.eye(4))[0], ((2, 4, 4),)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_library_calls_of_all_layouts(name):
    function, sizes = MATRICES[name]
    ways = [views(*one) for one in sizes]
    calls = list(itertools.product(*ways))[:: 2 * len(sizes)]

    def every(*args):
        given = iter(args)
        results = [function(*itertools.islice(given, len(sizes))) for _ in calls]
        return [one for result in results for one in (result if isinstance(result, tuple) else (result,))]

    agree(
        every,
        *itertools.chain.from_iterable(calls),
        under=lambda: torch.backends.mkldnn.flags(enabled=False),
    )


@torch.library.custom_op("dlinfer_test::lies_elsewhere", mutates_args=())
def lies_elsewhere(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).t().contiguous().t()


@torch.library.register_fake("dlinfer_test::lies_elsewhere")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dlinfer_test::writes_and_lies_elsewhere", mutates_args=("state",))
def writes_and_lies_elsewhere(state: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    state.add_(1)
    return [(x * 2).t().contiguous().t(), torch.stack([x[0], x[0] + 1], 1)[:, 0]]


@torch.library.register_fake("dlinfer_test::writes_and_lies_elsewhere")
def _(state: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x), torch.empty_like(x[0])]


def test_kernels_whose_fakes_are_wrong():
    """Of an op that writes as well, and of a single dimension too."""
    x = torch.arange(24.0).view(4, 6)
    agree(lies_elsewhere, x)
    agree(writes_and_lies_elsewhere, torch.zeros(2), x)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_that_writes_its_statistics(training):
    norm = nn.BatchNorm2d(3).train(training)
    for x in views(2, 3, 5, 4):
        agree(norm, x)


def test_a_kernel_of_a_vendors_that_gives_a_part_of_something_larger(monkeypatch):
    """An op of dlinfer's, by a plugin's kernel: its result has the values, and lies as it likes."""
    from dlinfer import ops
    from dlinfer.vendor.cpu.inductor import kernels

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        made = ops.rms_norm.reference(x, weight, eps)
        return torch.stack([made, made], -1)[..., 0]

    monkeypatch.setattr(kernels, "direct_kernel", lambda name, device: rms_norm)
    monkeypatch.setattr(kernels, "is_norm_call", lambda node: False)
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8, dtype=torch.bfloat16)
    agree(lambda x: ops.rms_norm(x, weight, 1e-6), x)


def test_a_list_from_outside_the_region(monkeypatch):
    """Its items come in as one input, and are taken out of it inside."""
    x = torch.arange(24.0).view(4, 6)
    monkeypatch.setattr(
        InductorEngine,
        "refuses",
        lambda self, node: "it writes" if "lies_elsewhere" in str(node.target) else None,
    )
    agree(writes_and_lies_elsewhere, torch.zeros(2), x)
    agree(lies_elsewhere, x)


def test_a_setting_of_torch_at_a_later_call():
    q = torch.randn(2, 8, 4, 16).transpose(1, 2)
    agree(lambda q: F.scaled_dot_product_attention(q, q, q), q, under=lambda: sdpa_kernel(SDPBackend.MATH))
    agree(lambda q: F.scaled_dot_product_attention(q, q, q), q, under=nullcontext)
