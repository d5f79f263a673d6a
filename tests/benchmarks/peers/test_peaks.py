"""What a machine can do, from seconds that are made up."""

import time

import pytest
import torch

from benchmarks.peers import peaks


def test_read_bandwidth(monkeypatch):
    monkeypatch.setattr(peaks, "_seconds", lambda _: 0.5)
    monkeypatch.setattr(torch, "ones", torch.empty)  # of memory that nobody touches
    assert peaks.read_bandwidth() == 2 * 2**30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product_peak(monkeypatch, dtype):
    products = []
    monkeypatch.setattr(peaks, "_seconds", lambda call: products.append(call()) or 0.5)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    assert peaks.product_peak() == (str(dtype).removeprefix("torch."), 2 * 1024 * 1024 * 4096 / 0.5)
    assert products[0].shape == (1024, 4096) and products[0].dtype == dtype


def test_the_first_two_calls_do_not_count(monkeypatch):
    now = iter([0.0, 9.0] * 2 + [1.0, 1.25] * 4 + [1.0, 1.5] * 1 + [1.0, 1.75] * 5)
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    called = []
    assert peaks._seconds(lambda: called.append(1)) == pytest.approx((0.5 + 0.75) / 2)
    assert len(called) == 12
