"""Results of kernels that are not ours, compared with what their ops' fake functions say."""

import pytest
import torch

from dlinfer.errors import GraphRunError
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.ir.result_check import check_result, expected_result, maker_of
from dlinfer.graph.torch_private.fake_mode import fresh_mode
from tests.graph.compiling import StubEngine, compiled, use_engine


@torch.library.custom_op("result_check::rows", mutates_args=())
def rows(x: torch.Tensor, less: int) -> torch.Tensor:
    return x[: len(x) - less].clone()


@rows.register_fake
def _(x, less):
    return torch.empty_like(x)


@torch.library.custom_op("result_check::cast", mutates_args=())
def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)


@cast.register_fake
def _(x, dtype):
    return torch.empty_like(x)


@torch.library.custom_op("result_check::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clone(), x.sum(0)


@pair.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("result_check::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


@turned.register_fake
def _(x):
    return torch.empty_like(x)


x = torch.ones(64, 8)
WRONG = {
    "rows": (
        lambda x: (rows(x, 1) * 2 + 1).relu(),
        r"returned float32\[63, 8\], but its fake function returns float32\[64, 8\]",
    ),
    "rank": (
        lambda x: pair(x)[1] * 2 + 1,
        r"returned float32\[8\], but its fake function returns float32\[64, 8\]",
    ),
    "dtype": (
        lambda x: cast(x, torch.bfloat16) * 2 + 1,
        r"returned bfloat16\[64, 8\], but its fake function returns float32",
    ),
    "number": (
        lambda x: cast(x.sum(), torch.float16) * x + 1,
        r"returned float16\[\], but its fake function returns float32\[\]",
    ),
}


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "inductor") for name in WRONG),
        ("rows", "another"),
        ("dtype", "another"),
        ("number", "another"),
    ],
)
def test_a_wrong_fake_function_is_named(name, engine, monkeypatch):
    if engine != "inductor":
        use_engine(monkeypatch, StubEngine(refused=["result_check.rows", "result_check.cast"]))
    function, said = WRONG[name]
    with torch.no_grad(), pytest.raises(GraphRunError, match=said) as caught:
        compiled(function)(x)
    assert "(result_check." in str(caught.value)
    assert __file__ in str(caught.value)


@pytest.mark.usefixtures("graph_mode")
def test_a_wrong_size_that_changes_is_named():
    run = compiled(lambda x, less: (rows(x, less) * 2 + x).relu())
    with torch.no_grad():
        for count in (64, 32, 16):
            torch.testing.assert_close(run(torch.ones(count, 8), 0), torch.full((count, 8), 3.0))
        with pytest.raises(
            GraphRunError, match=r"returned float32\[23, 8\], but its fake function returns float32\[24, 8\]"
        ):
            run(torch.ones(24, 8), 1)


@pytest.mark.usefixtures("graph_mode")
def test_wrong_strides_are_laid_out_and_right_results_pass():
    run = compiled(lambda x: (turned(x) * 2 + 1, rows(x, 0) + 1, pair(x)[0] * 2, torch.nonzero(x) + 1))
    given = torch.randn(6, 4)
    with torch.no_grad():
        torch.testing.assert_close(
            run(given), (given * 2 + 1, given + 1, given * 2, torch.nonzero(given) + 1)
        )


def test_what_is_expected_of_a_node():
    mode = fresh_mode()
    graph = trace(lambda x: pair(x.t() + 1)[0][1:], [mode.from_tensor(x)], mode).graph_module.graph
    calls = {node.name: node for node in graph.nodes if node.op == "call_function"}
    found = {name: expected_result(node) for name, node in calls.items()}
    of_add, of_item, *_ = [name for name, expected in found.items() if expected is not None]
    assert [maker_of(calls[name]) for name in (of_add, of_item)] == ["aten.add.Tensor", "result_check.pair"]
    (placeholder,) = graph.find_nodes(op="placeholder")
    assert found[of_item] == (torch.float32, ((placeholder, 1), (placeholder, 0)))


def test_any_size_is_taken_where_none_is_expected():
    check_result(torch.ones(3, 4), torch.float32, (None, 4))
    for dtype, sizes in ((torch.float64, (3, 4)), (torch.float32, (None, 5)), (torch.float32, (3,))):
        with pytest.raises(ValueError, match="its fake function returns"):
            check_result(torch.ones(3, 4), dtype, sizes)
