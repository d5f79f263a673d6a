"""LMDeploy's quant_policy on our devices: what its attention layers get, what is refused, and how large a cache is."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.messages import QuantPolicy
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.layers.attention import PagedAttention
from dlinfer.framework.lmdeploy_ext.layers.quantised import kv_quantisation
from dlinfer.vendor import discovery
from dlinfer.vendor.base import Probe, Vendor
from tests.framework.lmdeploy_ext.layers.attention_specs import KV_HEADS, SIZE, paged_spec
from tests.framework.lmdeploy_ext.layers.test_attention import BLOCK, Step
from tests.ops.test_quantised_kv_cache import POLICIES, new_caches, read


class QuantisedStep(Step):
    """A step over quantised caches, which hold the older tokens."""

    def __init__(self, new: list[int], old: list[int], decoding: bool, policy: int) -> None:
        super().__init__(new, old, decoding)
        self.metadata.quant_policy = QuantPolicy(policy)
        shape = (self.k_cache.shape[0], BLOCK, KV_HEADS)
        self.k_cache, self.v_cache, *self.scales = new_caches(shape, (SIZE, SIZE), policy, torch.float32)
        if sum(old):
            before = Step.__new__(QuantisedStep)
            before.__dict__ |= self.__dict__
            before.new, before.query = old, torch.randn(sum(old), *self.query.shape[1:])
            before.keys, before.values = (
                [one[:length] for one, length in zip(whole, old, strict=True)]
                for whole in (self.keys, self.values)
            )
            table, ends = self.table.long(), torch.tensor([0, *old]).cumsum(0).int()
            slots = torch.cat(
                [
                    table[row, torch.arange(length) // BLOCK] * BLOCK + torch.arange(length) % BLOCK
                    for row, length in enumerate(old)
                ]
            )
            before.metadata = SimpleNamespace(
                **vars(self.metadata)
                | {
                    "is_decoding": False,
                    "is_prefill_no_cache": True,
                    "kv_start_indices": slots,
                    "kv_seqlens_cpu": torch.tensor(old),
                    "cu_seqlens_q_cpu": ends,
                }
            )
            before.run(PagedAttention.from_spec(paged_spec()))

    def run(self, layer: Any, **options: Any) -> Tensor:
        k_scales, v_scales = self.scales
        return super().run(layer, k_scales_zeros=k_scales, v_scales_zeros=v_scales, **options)

    def read_back(self) -> None:
        """Take what the caches hold for keys and values."""
        for cache, scales, into in (
            (self.k_cache, self.scales[0], self.keys),
            (self.v_cache, self.scales[1], self.values),
        ):
            held = torch.from_numpy(read(cache, scales, int(self.metadata.quant_policy)))
            for row, length in enumerate(self.total):
                into[row] = held[self.table[row].long()].flatten(0, 1)[:length]


STEPS = {
    "prefill": ([1, 33], [0, 0], False),
    "chunked prefill": ([5, 17], [20, 16], False),
    "decode": ([1, 1], [31, 4], True),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("step", STEPS)
def test_layers_attend_to_what_the_cache_holds(step: str, policy: int):
    """The new tokens' keys too, so that a prompt is answered alike at once, in chunks and from a cached beginning."""
    made = QuantisedStep(*STEPS[step], policy)
    exact = made.expected()
    out = made.run(PagedAttention.from_spec(paged_spec()))
    made.read_back()
    torch.testing.assert_close(out.double(), made.expected(), atol=2e-5, rtol=2e-5)
    moved = (made.expected() - exact).abs().max()
    assert 1e-4 < moved < 0.5


def test_a_model_that_passes_no_scales_is_refused():
    step = QuantisedStep([3], [0], False, 8)
    with pytest.raises(UnsupportedFeatureError, match=r"quant_policy=8 with this model.*Next step"):
        Step.run(step, PagedAttention.from_spec(paged_spec()))


# --- what is taken and refused


def engine_config(policy: int, **options: Any) -> Any:
    """As users write it, who give numbers."""
    given: dict[str, Any] = {"quant_policy": policy} | options
    return PytorchEngineConfig(device_type="cpu", **given)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_that_are_served(policy: int):
    config = engine_config(policy)
    assert config.quant_policy is QuantPolicy(policy)
    assert (config.device_type, config.block_size) == ("cpu", 64)
    assert ConfigBuilder.build_cache_config(ConfigBuilder.update_engine_config(config)).quant_policy == policy


def test_what_is_no_policy_lmdeploy_refuses():
    with pytest.raises(ValueError, match="invalid quant_policy: 5"):
        engine_config(5)
    with pytest.raises(AssertionError, match="kernel_block_size"):
        engine_config(8, block_size=8)


def test_a_vendor_without_kernels_is_refused_and_named(monkeypatch):
    plain = dict(discovery.kernels_of(discovery.get("cpu")))
    del plain["quantised_paged_decode_attention"]
    made = Vendor("bare", "cpu", "", lambda: Probe(True, ""), lambda: plain)
    monkeypatch.setitem(discovery._loaded, "bare", made)
    discovery.use("bare")
    try:
        with pytest.raises(
            UnsupportedFeatureError, match="without a kernel of quantised_paged_decode_attention"
        ):
            engine_config(4)
        PytorchEngineConfig(device_type="cpu")
    finally:
        discovery.use("cpu")


def model(k: int | None, v: int | None) -> Any:
    return SimpleNamespace(head_dim=64, k_head_dim=k, v_head_dim=v)


@pytest.mark.parametrize(
    ("policy", "given", "complaint"),
    [
        (0, (576, 0), ""),
        (8, (None, None), ""),
        (4, (192, 128), ""),
        (16, (576, 0), ""),
        (8, (576, 0), "latent attention"),
        (4, (576, 0), "latent attention"),
        (4, (33, 32), "key heads of 33 and value heads of 32"),
        (8, (33, 33), ""),
    ],
)
def test_models_that_a_policy_cannot_hold(policy: int, given: tuple[int | None, int | None], complaint: str):
    cache = SimpleNamespace(quant_policy=QuantPolicy(policy))
    if not complaint:
        kv_quantisation.check_model(model(*given), cache)
        return
    with pytest.raises(UnsupportedFeatureError, match=complaint):
        kv_quantisation.check_model(model(*given), cache)


# --- sizes


PAGE = (Path(__file__).parents[5] / "docs" / "guides" / "kv_cache.md").read_text()
BYTES = [tuple(map(int, row)) for row in re.findall(r"^\| (\d+) \| .* \| (\d+) \|$", PAGE, re.MULTILINE)]


def test_the_page_has_every_policy():
    assert [policy for policy, _ in BYTES] == [0, *POLICIES]


@pytest.mark.parametrize(("policy", "per_token"), BYTES)
def test_bytes_of_a_token(policy: int, per_token: int):
    """Of the shape of docs/guides/kv_cache.md, as LMDeploy plans them: what our sizing divides the memory by."""
    from lmdeploy.pytorch.config import CacheConfig, ModelConfig
    from lmdeploy.pytorch.engine.cache_engine.plan import build_block_cache_plan

    PytorchEngineConfig(device_type="cpu")
    config = ModelConfig(
        hidden_size=896,
        num_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=[2],
        head_dim=64,
        dtype=torch.bfloat16,
    )
    cache = CacheConfig(
        max_batches=4,
        block_size=64,
        num_cpu_blocks=0,
        num_gpu_blocks=16,
        kernel_block_size=64,
        quant_policy=QuantPolicy(policy),
        device_type="cpu",
    )
    assert build_block_cache_plan(config, cache, 1).logical_block_nbytes == 64 * per_token
