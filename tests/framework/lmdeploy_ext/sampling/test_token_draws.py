"""LMDeploy's processor takes its tokens by the device's sampler: the ones that it would have taken itself."""

from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.engine import logits_process
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs
from torch import Tensor

from dlinfer import settings
from dlinfer.errors import FallbackError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.sampling.multinomial import (
    SeededMultinomialSampling,
    philox_uniform,
)
from dlinfer.ops.core import fallback
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.device import CpuDevice
from tests.vendor.cpu.sampling_oracle import Limits, may_be_drawn
from tests.vendor.cpu.test_native import needs_compiler

ROWS, WIDTH = 40, 3000
# LMDeploy's softmax and sums, in float32, of thousands of numbers; ours are nearer (tests/vendor/cpu).
ROUNDING = 1e-5


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    PytorchEngineConfig(device_type="cpu")
    assert native.why_not() is None


pytestmark = needs_compiler


@pytest.fixture
def own_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDeploy's own way, which outside an engine would take CUDA's kernel."""
    drawn = SeededMultinomialSampling().forward
    monkeypatch.setattr(logits_process, "_multinomial_sampling", drawn)


def logits_of(seed: int, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def inputs_of(limits: list[Limits]) -> SamplingInputs:
    """As LMDeploy's strategy makes them of the requests of a batch (strategies/ar/sampling.py)."""
    top_k = torch.tensor([one.top_k for one in limits])
    most = 0 if (top_k <= 0).any() else int(top_k.max())
    top_p, min_p = (torch.tensor([one[i] for one in limits]) for i in (1, 2))
    given: dict[str, Any] = {
        "top_k": None if (top_k == most).all() else top_k,
        "top_p": None if (top_p == 1).all() else top_p,
        "min_p": None if (min_p == 0).all() else min_p,
    }
    return SamplingInputs(
        max_top_k=most,
        **given,
        random_seeds=torch.arange(len(limits)) + 5,
        random_offsets=torch.arange(len(limits)),
        batch_size=len(limits),
    )


def processor(limits: list[Limits]) -> FusedLogitsProcessor:
    return FusedLogitsProcessor(inputs_of(limits))


def original(of: FusedLogitsProcessor, logits: Tensor) -> Tensor:
    way: Any = FusedLogitsProcessor.sampling
    return way.__wrapped__(of, logits)


def counted() -> dict[str, str]:
    return {one.op: one.reason for one in fallback.counts()}


@pytest.mark.usefixtures("own_sampling")
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param([Limits()], id="all"),
        pytest.param([Limits(top_k=50)], id="one top_k"),
        pytest.param([Limits(top_k=50), Limits(top_k=7), Limits(top_k=1)], id="several top_k"),
        pytest.param([Limits(top_k=50), Limits(), Limits(top_k=1)], id="top_k and none"),
        pytest.param([Limits(top_p=0.9)], id="top_p"),
        pytest.param([Limits(min_p=0.05)], id="min_p"),
        pytest.param([Limits(40, 0.8, 0.01), Limits(40, 0.5), Limits(3, 1.0, 0.5)], id="all of them"),
    ],
)
def test_tokens_are_those_of_lmdeploys_own_way(limits):
    for_rows = (limits * ROWS)[:ROWS]
    logits, of = logits_of(len(limits)), processor(for_rows)
    before = logits.clone()
    with settings.override(fallback="error"):
        ours = of.sampling(logits)
    assert torch.equal(logits, before)
    theirs = original(of, logits.clone())
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    numbers = philox_uniform(of.sampling_inputs.random_seeds, of.sampling_inputs.random_offsets).tolist()
    for row, number, given, one, other in zip(logits, numbers, for_rows, ours, theirs, strict=True):
        if one != other:
            assert {int(one), int(other)} <= set(may_be_drawn(row, number, given, ROUNDING).tolist())
    assert (ours == theirs).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_logit(dtype):
    logits = logits_of(1, dtype=dtype)
    with settings.override(fallback="error"):
        assert torch.equal(processor([Limits(top_k=1)] * ROWS).sampling(logits), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_draws_of_16_bits_are_not_rounded_to_them(dtype):
    logits, limits = logits_of(2, dtype=dtype), Limits(top_p=0.9)
    of = processor([limits] * ROWS)
    numbers = philox_uniform(of.sampling_inputs.random_seeds, of.sampling_inputs.random_offsets).tolist()
    for row, number, token in zip(logits, numbers, of.sampling(logits).tolist(), strict=True):
        assert token in may_be_drawn(row, number, limits, 2e-6)


def test_rows_that_lmdeploy_selects():
    logits, limits = logits_of(3, 6), [Limits(top_k=20 + i) for i in range(6)]
    every = processor(limits).sampling(logits)
    some = FusedLogitsProcessor(inputs_of(limits).select_sampling_rows(slice(1, None, 2))).sampling(
        logits[1::2]
    )
    assert torch.equal(some, every[1::2])


@pytest.mark.usefixtures("own_sampling")
def test_what_the_kernels_cannot_serve_is_lmdeploys_and_counted(monkeypatch):
    logits = logits_of(4, 3).double()
    fallback.reset()
    with settings.override(fallback="allow"):
        for limits, op in ((Limits(top_k=1), "largest_tokens"), (Limits(top_k=9), "drawn_tokens")):
            of = processor([limits] * 3)
            assert torch.equal(of.sampling(logits), original(of, logits.clone()))
            assert counted()[op] == "the logits have dtype float64"
    with settings.override(fallback="error"), pytest.raises(FallbackError, match="float64"):
        processor([Limits(top_k=9)] * 3).sampling(logits)
    fallback.reset()


def not_to_be_called(*_: object) -> None:
    raise AssertionError("the sampler was asked")


@pytest.mark.usefixtures("own_sampling")
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        pytest.param(activation, "_active", None, id="no device of ours"),
        pytest.param(activation, "torch_device", lambda: "npu", id="another device's tensors"),
        pytest.param(CpuDevice, "sampler", lambda self: None, id="a device without a sampler"),
    ],
)
def test_elsewhere_lmdeploy_takes_them_itself(monkeypatch, owner, name, value):
    logits, of = logits_of(5), processor([Limits(top_k=9)] * ROWS)
    expected = original(of, logits.clone())
    monkeypatch.setattr("dlinfer.vendor.cpu.sampling.CpuSampler.draw", not_to_be_called)
    monkeypatch.setattr(owner, name, value)
    assert torch.equal(of.sampling(logits), expected)
