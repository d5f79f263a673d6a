"""Inductor compiles, saves and loads graphs."""

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor.exc import InductorError

from dlinfer.graph.torch_private import fake_mode, inductor


def small(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.reshape(x.shape[0] * 2, -1) * k


def test_what_inductor_has_no_loop_for():
    assert inductor.calls_library(torch.ops.aten._fft_r2c.default)
    assert not inductor.calls_library(torch.ops.aten.mul.Tensor)


def test_the_configuration_names_what_was_changed(monkeypatch):
    everything, changed = inductor.configuration()
    assert {"cpp.simdlen", "max_autotune", "functorch.functionalize_rng_ops"} <= set(everything)
    with torch._inductor.config.patch({"cpp.simdlen": 128, "compile_threads": 77}):
        assert inductor.configuration() == (
            everything | {"cpp.simdlen": 128},
            changed | {"cpp.simdlen": 128},
        ), "how many threads compile changes no code"

    class Pass:
        def uuid(self):
            return "a pass, version 3"

    with torch._inductor.config.patch({"post_grad_custom_pre_pass": Pass()}):
        assert inductor.configuration()[1] == changed | {"post_grad_custom_pre_pass": "a pass, version 3"}
    for name in (print, [print]):
        with torch._inductor.config.patch({"_fuse_ddp_communication_passes": name}):
            assert "of process" in str(inductor.configuration()[1]["_fuse_ddp_communication_passes"])
    with torch._functorch.config.patch({"functionalize_rng_ops": True}):
        assert inductor.configuration()[1] == changed | {"functorch.functionalize_rng_ops": True}
    assert inductor.configuration() == (everything, changed)


def test_the_compiler_says_which_it_is(monkeypatch, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} 1.0\necho of another line\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for cxx, said in (("one", "one 1.0"), ((None, "two"), "two 1.0"), (("no such one",), "none")):
        with torch._inductor.config.patch({"cpp.cxx": cxx}):
            assert inductor.compiler() == said


@pytest.mark.slow
def test_loops_are_compiled_saved_and_loaded():
    mode = fake_mode.fresh_mode()
    x = mode.from_tensor(torch.ones(2, 3))

    def model(x):
        return (x * 2 + 1, x + torch.zeros(2, 3))

    graph = fake_mode.trace_decomposed(model, [x], mode, inductor.decompositions())
    compiled = inductor.compile_loops(graph, [x], mode)
    given = torch.arange(6.0).view(2, 3)
    for run in (compiled, inductor.load_loops(inductor.save_loops(compiled))):
        results = run(given)
        torch.testing.assert_close(tuple(results), model(given))
        assert results[1].data_ptr() != given.data_ptr(), "a result is no input in disguise"
    with pytest.raises(Exception):  # noqa: B017 -- any refusal will do
        inductor.load_loops(b"damaged")


@pytest.mark.slow
def test_large_results_of_loops_come_from_where_they_are_told():
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
    saved = inductor.save_loops(compiled)
    PyCodeCache.cache_clear()  # as in another process
    with inductor.results_from(large, 64 * 64 * 4):
        loaded = inductor.load_loops(saved)
    given = torch.arange(4096.0).view(64, 64)
    for run in (compiled, loaded):
        torch.testing.assert_close(tuple(run(given)), model(given))
        assert made == [((64, 64), (64, 1), torch.float32, 4)], "the sums are small"
        made.clear()
        inductor.loops_escape(True)
        torch.testing.assert_close(tuple(run(given)), model(given))
        inductor.loops_escape(False)
        assert made == []


@pytest.mark.slow
def test_what_another_thread_compiles_meanwhile_is_its_own(tmp_path):
    from torch._inductor.codecache import PyCodeCache

    made: dict[str, list[Any]] = {"ours": [], "theirs": []}

    def large(name):
        def take(size, stride, dtype, item_bytes):
            made[name].append(size)
            return torch.empty_strided(size, stride, dtype=dtype)

        return take

    def compiled(constant: float):
        mode = fake_mode.fresh_mode()
        x = mode.from_tensor(torch.ones(64, 64))
        graph = fake_mode.trace_decomposed(
            lambda x: (x * constant - 1,), [x], mode, inductor.decompositions()
        )
        return inductor.compile_loops(graph, [x], mode)

    PyCodeCache.cache_clear()
    ours_begun, theirs_done = threading.Event(), threading.Event()

    def ours():
        with inductor.results_from(large("ours"), 1):
            ours_begun.set()
            assert theirs_done.wait(300)
            return compiled(3.5)

    def theirs():
        assert ours_begun.wait(300)
        try:
            with inductor.results_from(large("theirs"), 1):
                told = compiled(4.5)
            return told, compiled(5.5)
        finally:
            theirs_done.set()

    with ThreadPoolExecutor(2) as pool:
        first, others = pool.submit(ours), pool.submit(theirs)
        runs = [first.result(), *others.result()]
    x = torch.ones(64, 64)
    for run, constant in zip(runs, (3.5, 4.5, 5.5), strict=True):
        torch.testing.assert_close(run(x)[0], x * constant - 1)
    assert {name: len(sizes) for name, sizes in made.items()} == {"ours": 1, "theirs": 1}
    again = compiled(3.5)
    again(x)
    assert len(made["ours"]) == 1, "code that takes its memory elsewhere is shared with nobody"


def _not_loaded(library: Path) -> ImportError:
    """The error of a library that is cut short, as torch raises it."""
    library.write_bytes(b"")
    spec = importlib.util.spec_from_file_location("cut_short", library)
    assert spec is not None
    with pytest.raises(ImportError, match="too short") as caught:
        importlib.util.module_from_spec(spec)
    return caught.value


def test_a_library_that_is_cut_short_leaves_inductor_s_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    inside, outside = tmp_path / "cache" / "x.so", tmp_path / "y.so"
    wrapped = InductorError(_not_loaded(inside), None)
    assert inductor.remove_damaged_library(wrapped) and not inside.exists()
    assert not inductor.remove_damaged_library(_not_loaded(outside)) and outside.exists()
    assert not inductor.remove_damaged_library(RuntimeError("another"))
