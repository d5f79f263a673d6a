"""What LMDeploy 0.18 asks of dlinfer for these cards, called through its own code, on the simulated card.

LMDeploy is put on the card by this adaptor's backend (test_simulated.py). Its own MacaOpsBackend is not used; what of
it can be called is called here.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch import kernels
from lmdeploy.pytorch.backends.dlinfer.maca import MacaOpsBackend
from lmdeploy.pytorch.kernels import dlinfer as called

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import devices
from dlinfer.vendor import discovery, maca
from dlinfer.vendor.maca import latent, sdk
from tests.vendor.maca import accept, real_sizes
from tests.vendor.maca.checks_sizes import maker
from tests.vendor.maca.simulated_card import triton_package
from tests.vendor.maca.simulated_card.calling import calls
from tests.vendor.maca.simulated_card.install import NAME


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one.cpu().double(), other.double(), rtol=3e-3, atol=3e-3)


def test_the_adaptor_serves_the_device():
    assert kernels.__name__ and devices.serves("maca") and devices.torch_device("maca") == NAME
    assert discovery.get("maca").device_type == NAME
    memory = discovery.device(NAME).memory()
    assert 0 < memory.available <= memory.total and not memory.shared


def test_caches_lie_as_lmdeploy_s_own_backend_has_them():
    ours = maca.VENDOR.kv_cache_layout.shape(1, 64, 2, 128)[1:]
    assert MacaOpsBackend.get_k_block_shape(64, 2, 128, torch.float16) == ours
    assert MacaOpsBackend.get_v_block_shape(64, 2, 128, torch.float16) == ours


def test_blocks_are_those_of_flash_mla():
    """For keys of 512 numbers and more LMDeploy would take 32, where the vendor states nothing."""
    assert maca.BLOCK_SIZE == latent.PAGE
    for given in (64, 128):
        config = PytorchEngineConfig(device_type="maca", block_size=given)
        assert (config.block_size, config.kernel_block_size) == (given, maca.BLOCK_SIZE)
    with pytest.raises(UnsupportedFeatureError, match="a multiple of 64"):
        PytorchEngineConfig(device_type="maca", block_size=32)


def test_lmdeploy_s_own_backend_does_not_start_in_this_release():
    """It builds metadata with a field that the dataclass no longer has, at the first step: nothing to patch for us."""
    context: Any = SimpleNamespace(
        kv_caches=[(torch.zeros(2, 64, 2, 64), torch.zeros(2, 64, 2, 64))],
        is_decoding=True,
        block_offsets=torch.tensor([[0]]),
        q_start_loc=torch.tensor([0]),
        q_seqlens=torch.tensor([1]),
        kv_seqlens=torch.tensor([5]),
    )
    with pytest.raises(TypeError, match="max_q_seq_len"):
        MacaOpsBackend.update_step_context(context)


def test_lmdeploy_s_kernels():
    """Norms, rotation, the gated activation, cache and attention in its own wrappers, which it calls with maca too."""
    make = maker(torch.float16)
    x, weight = make.tensor(1, 7, 64), make.tensor(64)
    close(
        called.rms_norm(x, weight, 1e-6),
        ops.rms_norm.reference(x.cpu().double(), weight.cpu().double(), 1e-6),
    )
    normalised, total = called.rms_norm(x, weight, 1e-6, residual=x)
    close(total, 2 * x.cpu().double())
    assert normalised.shape == x.shape
    q, k, cos, sin = real_sizes.rotation(make, 64)
    turned, _ = called.apply_rotary_pos_emb(q, k, cos, sin, None, None)
    close(turned, ops.apply_rotary_pos_emb.reference(*(one.cpu().double() for one in (q, k, cos, sin)))[0])
    gate = make.tensor(5, 64)
    close(ops.silu_and_mul(gate), ops.silu_and_mul.reference(gate.cpu().double()))
    assert {"rms_norm", "fused_add_rms_norm", "lmdeploy_rotary_embedding", "silu_and_mul"} <= set(calls)


def test_lmdeploy_s_attention():
    make = maker(torch.float16)
    q, k, v = make.tensor(7, 4, 64), make.tensor(7, 2, 64), make.tensor(7, 2, 64)
    caches = make.cache(2, 16, 2, 64), make.cache(2, 16, 2, 64)
    slots = torch.tensor([0, 1, 2, 16, 17, 18, 19], device=NAME)
    called.fill_kv_cache(k, v, *caches, slots, (), ())
    lengths, ends = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=NAME)
    want = torch.empty(7, 4, 64, dtype=torch.float64)
    host = (one.cpu().double() for one in (q, k, v))
    ops.prefill_attention.reference(
        *host, ends[1:], lengths, 4, 4, 2, want, 0.125, True, -1, -1, 0.0, None, None
    )
    for no_cache in (True, False):
        out = called.paged_attention_fwd(
            *(q, k, v, torch.empty_like(q), *caches, table, lengths, lengths, 4, 4, False),
            *(16, 4, 2, 64, ends, ends, lengths),
            softmax_scale=0.125,
            is_prefill_no_cache=no_cache,
        )
        close(out, want)
    out = called.paged_attention_fwd(
        *(
            q[[2, 6]],
            k[[2, 6]],
            v[[2, 6]],
            torch.empty_like(q[:2]),
            *caches,
            table,
            lengths,
            lengths,
            1,
            4,
            True,
        ),
        *(16, 4, 2, 64, ends, ends, lengths),
        softmax_scale=0.125,
    )
    close(out, want[[2, 6]])
    assert calls["flash_attn_varlen_func"] == 2 and calls["flash_attn_with_kvcache"] == 1


@pytest.mark.skipif(bool(triton_package.missing()), reason=triton_package.missing() or "there")
def test_lmdeploy_s_experts():
    from dlinfer.utils.type_annotation import MoeMetadata

    make = maker(torch.float16)
    hidden, gate_up, down, *_ = real_sizes.experts(make, 2)
    logits, metadata = make.tensor(70, 6), MoeMetadata()
    weights, ids = called.moe_gating_topk_softmax(logits, 2, metadata)
    out = called.fused_moe(hidden, gate_up, down, weights, ids, 2, True, metadata)
    host = (
        one.cpu().double() if one.is_floating_point() else one.cpu()
        for one in (hidden, gate_up, down, weights, ids)
    )
    close(out, ops.fused_moe.reference(*host, 2, True))


def test_a_probe_says_why_not(monkeypatch):
    assert sdk.probe().available
    monkeypatch.setattr(type(sdk.cards()), "device_count", lambda self: 0)
    assert sdk.probe().reason == "torch sees no card"

    def fails(self):
        raise RuntimeError("no driver\nmore")

    monkeypatch.setattr(type(sdk.cards()), "device_count", fails)
    assert sdk.probe().reason == "torch failed to look for cards: RuntimeError: no driver"
    real = sdk.importlib.util.find_spec
    monkeypatch.setattr(
        sdk.importlib.util, "find_spec", lambda name: None if name == "flash_attn" else real(name)
    )
    assert sdk.probe().reason == "flash_attn is not installed"


def test_the_command_that_accepts_a_card(tmp_path, capsys, monkeypatch):
    """On the simulation, with a few calls: what it says of good ones, of wrong numbers and of a kernel that fails."""
    import json

    few = {name: accept.KERNELS[name] for name in ("silu_and_mul", "dynamic_quant")}
    monkeypatch.setattr(accept, "KERNELS", few)
    file = tmp_path / "found.json"
    assert accept.main(str(file)) == 0
    found = json.loads(file.read_text())
    assert found["card"]["name"] == "simulated" and found["card"]["device_type"] == NAME
    assert {row["outcome"] for row in found["calls"]} == {"native", "refused"}
    assert all(row["detail"] for row in found["calls"] if row["outcome"] == "refused")
    assert "PASS" in capsys.readouterr().out
    genuine = torch.ops._C.silu_and_mul
    monkeypatch.setitem(torch.ops._C.__dict__, "silu_and_mul", lambda out, x: (genuine(out, x), out.mul_(2)))
    monkeypatch.setitem(torch.ops._C.__dict__, "dynamic_scaled_int8_quant", lambda *args: 1 / 0)
    assert accept.main(str(file)) == 1
    assert {row["outcome"] for row in json.loads(file.read_text())["calls"]} >= {"wrong", "failed"}
    assert "ZeroDivisionError" in capsys.readouterr().out
