"""Attention, experts and products in real sizes: every call is answered by a kernel; and what kernels do besides."""

import inspect
import json

import pytest
import torch

from dlinfer import ops, settings
from dlinfer.errors import OpArgumentError
from dlinfer.ops.core import kernels
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.vendor.camb import VENDOR, sdk
from tests.ops import cases
from tests.vendor.camb import accept, real_sizes, signatures
from tests.vendor.camb.checks_ops import compare
from tests.vendor.camb.simulated_mlu import install

DECLINED = {("prefill_attention", "more queries than keys")}
dtypes = pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=cases.short)


def maker(dtype: torch.dtype) -> SampleMaker:
    return SampleMaker(dtype, device=install.NAME, layout=VENDOR.kv_cache_layout)


@dtypes
@pytest.mark.parametrize("call", list(real_sizes.calls()), ids=lambda call: f"{call.op}-{call.name}")
def test_every_call(call, dtype):
    declined = (call.op, call.name.partition(",")[0]) in DECLINED
    assert bool(compare(ops.registry()[call.op], call.arguments(maker(dtype)), dtype)) is declined


def test_one_call_of_the_vendor_for_all_sequences():
    for call in real_sizes.calls():
        if call.op.endswith("attention") and "more queries" not in call.name:
            install.calls.clear()
            compare(ops.registry()[call.op], call.arguments(maker(torch.float16)), torch.float16)
            assert sum(install.calls.values()) == 1, call.name


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("fill_kv_cache", "reshape_paged_cache"),
        ("paged_decode_attention", "single_query_cached_kv_attn"),
        ("paged_prefill_attention", "flash_attention"),
    ],
)
def test_a_latent_cache_is_given_as_the_vendor_s_vllm_does(op, function, monkeypatch):
    call = next(one for one in real_sizes.calls() if (one.op, one.name) == (op, "latent"))
    tmo, given = sdk.tmo(), {}
    unwatched = getattr(tmo, function)
    signature = inspect.signature(unwatched)

    def watched(*args, **kwargs):
        given.update(signature.bind(*args, **kwargs).arguments)
        return unwatched(*args, **kwargs)

    monkeypatch.setattr(tmo, function, watched)
    assert not compare(ops.registry()[op], call.arguments(maker(torch.float16)), torch.float16)
    meanings = {"None": None, "k": given.get("k"), "value.shape[-1]": 512}
    for argument, value in signatures.of_latent_caches()[function].items():
        assert given[argument] is meanings[value] or given[argument] == 512 == meanings[value], argument


def latents(made):
    """fill_kv_cache whose cache of values ``made`` makes of the one of keys."""
    make = maker(torch.float16)
    cache = make.cache(4, 16, 1, 40)
    slots = torch.tensor([5, -1, 60, 17], device=install.NAME)
    values = made(cache)
    return make.tensor(4, 1, 40), make.tensor(4, 1, values.shape[-1]), cache, values, slots


def test_values_of_a_latent_cache_win_over_the_keys_first_numbers():
    """As where both are written, values last; LMDeploy gives the same numbers twice."""
    k, v, cache, values, slots = latents(lambda cache: cache[..., :32])
    wanted = VENDOR.kv_cache_layout.canonical(cache.cpu()).flatten(0, 1).clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot] = torch.cat((v.cpu()[token], k.cpu()[token, :, 32:]), -1)
    with settings.override(fallback="error"):
        ops.fill_kv_cache(k, v, cache, values, slots)
    assert torch.equal(VENDOR.kv_cache_layout.canonical(cache.cpu()).flatten(0, 1), wanted)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda cache: cache[..., 8:], id="that begin later"),
        pytest.param(lambda cache: cache.clone()[..., :32], id="of other memory"),
        pytest.param(lambda cache: cache[..., ::2], id="every second number"),
        pytest.param(lambda cache: cache.flip(0)[..., :32], id="of blocks in another order"),
    ],
)
def test_values_that_are_no_beginning_of_the_keys_are_refused(made):
    assert "caches are not contiguous" in (
        kernels.refusal("fill_kv_cache", install.NAME, latents(made)) or ""
    )


@dtypes
@pytest.mark.parametrize("size", [2, 32, 80, 128, 256])
def test_rotation_leaves_its_arguments_alone(size, dtype):
    """Without an output the vendor writes into them."""
    make = maker(dtype)
    angles = make.tensor(5, size, scale=3.0)
    q, k = make.tensor(5, 4, size), make.tensor(5, 2, size)
    before = q.cpu().clone(), k.cpu().clone()
    assert not compare(ops.apply_rotary_pos_emb, (q, k, angles.cos(), angles.sin()), dtype)
    assert torch.equal(q.cpu(), before[0]) and torch.equal(k.cpu(), before[1])


def test_attention_may_be_written_over_what_it_reads():
    """A projection's q, k and v in one tensor, and the result in the place of the values."""
    make = maker(torch.float16)
    packed = make.tensor(9, 6, 64)
    q, k, v = packed[:, :2], packed[:, 2:4], packed[:, 4:]
    ends = torch.tensor([4, 9])
    args = q, k, v, ends, torch.tensor([4, 5]), 5, 2, 2, v, 0.125, True, -1, -1, 0.0, None, None
    assert not compare(ops.prefill_attention, args, torch.float16)


def test_slots_are_looked_at_once_a_step(monkeypatch):
    from dlinfer.vendor.camb import slots as module

    looks = []
    real = module.check_slots
    monkeypatch.setattr(module, "check_slots", lambda *args: looks.append(1) or real(*args))
    make = maker(torch.float16)
    k, v, slots = make.tensor(4, 2, 64), make.tensor(4, 2, 64), make.permutation(64)[:4]
    for _ in range(3):  # layers
        caches = make.cache(4, 16, 2, 64), make.cache(4, 16, 2, 64)
        compare(ops.fill_kv_cache, (k, v, *caches, slots), torch.float16)
    slots.copy_(slots.flip(0))
    compare(
        ops.fill_kv_cache, (k, v, make.cache(4, 16, 2, 64), make.cache(4, 16, 2, 64), slots), torch.float16
    )
    assert len(looks) == 2


def test_a_slot_behind_the_end_is_refused_before_anything_is_written():
    make = maker(torch.float16)
    caches = make.cache(2, 16, 1, 32), make.cache(2, 16, 1, 32)
    before = [one.cpu().clone() for one in caches]
    slots = torch.tensor([3, 32], device=install.NAME)
    with pytest.raises(OpArgumentError, match="slots below 32"):
        ops.fill_kv_cache(make.tensor(2, 1, 32), make.tensor(2, 1, 32), *caches, slots)
    for one, kept in zip(caches, before, strict=True):
        assert torch.equal(one.cpu(), kept)
    assert not install.calls["reshape_paged_cache"]


@pytest.mark.parametrize(
    ("op", "spoil", "reason"),
    [
        (
            "apply_rotary_pos_emb",
            lambda args: (*(x.repeat(1, 1, 3) for x in args[:2]), *args[2:]),
            "2 to 256, not 384",
        ),
        ("paged_decode_attention", lambda args: (*args[:4], 12, *args[5:]), "1, 2, 4, 8, 16, 32, 64 slots"),
        (
            "paged_decode_attention",
            lambda args: (*args[:7], 258, 2, *args[9:]),
            "up to 128 query heads may share a KV head, not 129",
        ),
        ("paged_prefill_attention", lambda args: (*args[:4], 32, *args[5:]), "blocks of 16 slots"),
        ("silu_and_mul", lambda args: (args[0].double(),), "float32 are supported, not float64"),
    ],
)
def test_refusals_by_name(op, spoil, reason):
    made = {call.op: call for call in real_sizes.calls()}
    args = (
        (maker(torch.float16).tensor(2, 8),)
        if op == "silu_and_mul"
        else made[op].arguments(maker(torch.float16))
    )
    assert kernels.refusal(op, install.NAME, args) is None
    assert reason in (kernels.refusal(op, install.NAME, spoil(args)) or "")


def test_a_probe_says_why_not(monkeypatch):
    assert sdk.probe().available
    mlu = sdk.cards()
    monkeypatch.setattr(type(mlu), "device_count", lambda self: 0)
    assert sdk.probe().reason == "torch_mlu sees no MLU"

    def fails(self):
        raise RuntimeError("no driver\nmore")

    monkeypatch.setattr(type(mlu), "device_count", fails)
    assert sdk.probe().reason == "torch_mlu_ops cannot be loaded: RuntimeError: no driver"


def test_the_command_that_accepts_a_card(tmp_path, capsys, monkeypatch):
    """On the simulation, with a few calls: what it says of good ones, of wrong numbers and of a kernel that fails."""
    few = {name: accept.KERNELS[name] for name in ("silu_and_mul", "dynamic_quant")}
    monkeypatch.setattr(accept, "KERNELS", few)
    monkeypatch.setattr(real_sizes, "calls", lambda: iter(()))
    file = tmp_path / "found.json"
    assert accept.main(str(file)) == 0
    found = json.loads(file.read_text())
    assert found["card"]["name"] == "a simulated MLU" and found["drift"] == []
    assert {row["outcome"] for row in found["calls"]} == {"native", "refused"}
    assert all(row["detail"] for row in found["calls"] if row["outcome"] == "refused")
    assert "PASS" in capsys.readouterr().out
    tmo = sdk.tmo()
    real = tmo.active
    monkeypatch.setattr(tmo, "active", lambda *args: real(*args) * 2)
    monkeypatch.setattr(tmo, "scaled_quantize", lambda *args, **kwargs: 1 / 0)
    assert accept.main(str(file)) == 1
    found = json.loads(file.read_text())
    assert {row["outcome"] for row in found["calls"]} >= {"wrong", "failed"}
    assert [one.partition(":")[0] for one in found["drift"]] == ["active", "scaled_quantize"]
    assert "ZeroDivisionError" in capsys.readouterr().out
