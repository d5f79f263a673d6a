"""Inductor compiles, saves and loads graphs."""

import pytest
import torch

from dlinfer.graph.seam import fake_mode, inductor


def small(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.reshape(x.shape[0] * 2, -1) * k


def test_what_inductor_has_no_loop_for():
    assert inductor.calls_library(torch.ops.aten._fft_r2c.default)
    assert not inductor.calls_library(torch.ops.aten.mul.Tensor)


@pytest.mark.slow
def test_loops_are_compiled_saved_and_loaded(tmp_path):
    mode = fake_mode.fresh_mode()
    x = mode.from_tensor(torch.ones(2, 3))

    def model(x):
        return (x * 2 + 1, x + torch.zeros(2, 3))

    graph = fake_mode.trace_decomposed(model, [x], mode, inductor.decompositions())
    compiled = inductor.compile_loops(graph, [x], mode)
    inductor.save_loops(compiled, str(tmp_path / "loops"))
    given = torch.arange(6.0).view(2, 3)
    for run in (compiled, inductor.load_loops(str(tmp_path / "loops"))):
        results = run(given)
        torch.testing.assert_close(tuple(results), model(given))
        assert results[1].data_ptr() != given.data_ptr(), "a result is no input in disguise"
    (tmp_path / "loops").write_bytes(b"damaged")
    with pytest.raises(Exception):  # noqa: B017 -- any refusal will do
        inductor.load_loops(str(tmp_path / "loops"))


@pytest.mark.slow
def test_large_results_of_loops_come_from_where_they_are_told(tmp_path):
    from torch._inductor.codecache import PyCodeCache

    mode = fake_mode.fresh_mode()
    x = mode.from_tensor(torch.ones(64, 64))
    made = []

    def large(size, stride, dtype, item_bytes):
        made.append((size, stride, dtype, item_bytes))
        return torch.empty_strided(size, stride, dtype=dtype)

    def model(x):
        return (x * 3 - 1, x.sum(1) + 1)

    graph = fake_mode.trace_decomposed(model, [x], mode, inductor.decompositions())
    with inductor.results_from(large, 64 * 64 * 4):
        compiled = inductor.compile_loops(graph, [x], mode)
    inductor.save_loops(compiled, str(tmp_path / "loops"))
    PyCodeCache.cache_clear()  # as in another process
    with inductor.results_from(large, 64 * 64 * 4):
        loaded = inductor.load_loops(str(tmp_path / "loops"))
    given = torch.arange(4096.0).view(64, 64)
    for run in (compiled, loaded):
        torch.testing.assert_close(tuple(run(given)), model(given))
        assert made == [((64, 64), (64, 1), torch.float32, 4)], "the sums are small"
        made.clear()
