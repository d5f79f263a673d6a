"""Blocks of several ops, eagerly and on engines; a fault that only an engine or a second step shows is found."""

from dataclasses import replace

import pytest
import torch

from dlinfer.conformance import blocks, here
from dlinfer.conformance.result import FAILED, PASSED
from dlinfer.vendor import discovery

NAMES = [block.name for block in blocks.BLOCKS]
BEYOND = ["block_mla", "block_vit"]


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_kernels_give_what_the_reference_gives_in_float64(name):
    report = here.run(name, ops=NAMES, checks=["eager"])
    assert report.holds, report.failures
    dtypes = {
        block.name: {str(dtype).removeprefix("torch.") for dtype in block.dtypes} for block in blocks.BLOCKS
    }
    assert {(one.op, one.dtype) for one in report.results} == {
        (op, dtype) for op, names in dtypes.items() for dtype in names
    }
    assert all(one.detail == "" for one in report.results)  # nothing fell back


def test_the_oracle_leaves_the_vendor_active():
    here.run("cpu", ops=["block_mlp"], checks=["eager"])
    active = discovery.active("cpu")
    assert active is not None and active.name == "cpu"


def test_caches_are_read_in_the_second_step(monkeypatch):
    """A fill that loses the last slot of a block is right in prefill, and seen by who decodes."""
    right = dict(discovery.kernels_of(discovery.get("cpu")))

    def fill_kv_cache(k, v, k_cache, v_cache, kv_start_indices):
        right["fill_kv_cache"](
            k, v, k_cache, v_cache, torch.where(kv_start_indices % 8 == 3, -1, kv_start_indices)
        )

    broken = replace(
        discovery.get("cpu"), name="broken", load_kernels=lambda: {**right, "fill_kv_cache": fill_kv_cache}
    )
    monkeypatch.setitem(discovery._loaded, "broken", broken)
    report = here.run("broken", ops=["block_attention", "block_mlp"], checks=["eager"])
    states = {(one.op, one.state) for one in report.results}
    assert states == {("block_attention", FAILED), ("block_mlp", PASSED)}
    assert "of decoding" in report.failures[0].detail


def test_a_cache_of_values_that_is_a_part_of_that_of_keys_is_written_once(monkeypatch):
    """A fill that copies values behind the keys' place is right for caches apart, and wrong for latent attention."""
    right = dict(discovery.kernels_of(discovery.get("cpu")))

    def fill_kv_cache(k, v, k_cache, v_cache, kv_start_indices):
        apart = v_cache.contiguous().clone()
        right["fill_kv_cache"](k, v, k_cache, apart, kv_start_indices)
        v_cache.copy_(apart if k.shape[-1] == v.shape[-1] else apart.roll(1, 0))

    broken = replace(
        discovery.get("cpu"), name="broken", load_kernels=lambda: {**right, "fill_kv_cache": fill_kv_cache}
    )
    monkeypatch.setitem(discovery._loaded, "broken", broken)
    report = here.run("broken", ops=["block_attention", "block_mla"], checks=["eager"])
    assert {(one.op, one.state) for one in report.results} == {
        ("block_attention", PASSED),
        ("block_mla", FAILED),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "onnxruntime", "openvino"])
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param([name for name in NAMES if name not in BEYOND], id="decoders"),
        pytest.param(BEYOND, id="latent attention, vision", marks=pytest.mark.full),
    ],
)
def test_engines_give_what_the_reference_gives_in_float64(name, asked):
    try:
        discovery.use(name)
    except Exception as missing:  # noqa: BLE001 - an SDK that is not there
        pytest.skip(str(missing))
    report = here.run(name, ops=asked, checks=["graph", "dynamic"])
    assert report.holds, report.failures
    assert len(report.results) == 2 * len(asked)
