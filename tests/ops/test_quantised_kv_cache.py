"""Quantised KV caches against what numpy reads of their bytes, in float64: shares no arithmetic with the package."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlinfer import ops, vendor
from dlinfer.errors import OpArgumentError, UnsupportedFeatureError
from dlinfer.ops.attention.kv_quantisation import dequantise, quantise
from tests.ops import cases
from tests.ops.test_attention_property import Inputs, batches

POLICIES = (8, 4, 16, 17)
STORED = {8: torch.uint8, 4: torch.uint8, 16: torch.float8_e4m3fn, 17: torch.float8_e5m2}
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


# --- the oracle


def float8(bits: int, policy: int) -> float:
    """The value of one byte, by the format's definition (OCP 8-bit floating point)."""
    exponent_bits, bias = {16: (4, 7), 17: (5, 15)}[policy]
    mantissa_bits = 7 - exponent_bits
    sign, exponent, mantissa = (
        bits >> 7,
        bits >> mantissa_bits & (1 << exponent_bits) - 1,
        bits & (1 << mantissa_bits) - 1,
    )
    if policy == 16 and bits & 127 == 127:
        return float("nan")
    if policy == 17 and exponent == 31:
        return float("nan") if mantissa else (-1) ** sign * float("inf")
    fraction = mantissa / 2**mantissa_bits
    size = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
    return (-1) ** sign * size


TABLES = {policy: np.array([float8(bits, policy) for bits in range(256)]) for policy in (16, 17)}


def read(codes: Tensor, scales_zeros: Tensor, policy: int) -> np.ndarray:
    """What a cache [..., stored size] holds, in float64."""
    raw = codes.view(torch.uint8).numpy()
    if policy in TABLES:
        return TABLES[policy][raw] * float(scales_zeros)
    if policy == 4:
        raw = np.concatenate([raw % 16, raw // 16], axis=-1)
    pairs = scales_zeros.double().numpy()
    return (raw - pairs[..., 1:]) * pairs[..., :1]


def new_caches(
    shape: tuple[int, int, int], sizes: tuple[int, int], policy: int, dtype: torch.dtype
) -> list[Tensor]:
    """(k_cache, v_cache, k_scales_zeros, v_scales_zeros): what nobody has written is read as NaN."""
    caches = [
        torch.full((*shape, size // 2 if policy == 4 else size), 255, dtype=torch.uint8).view(STORED[policy])
        for size in sizes
    ]
    if policy in TABLES:
        return [*caches, torch.tensor(0.75), torch.tensor([1.5])]
    return caches + [torch.full((*shape, 2), torch.nan, dtype=dtype) for _ in sizes]


# --- writing


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """[tokens, heads, size] of wild magnitudes: offsets, equal elements, zeros."""
    dtype = draw(st.sampled_from(cases.DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(5, 2, draw(st.sampled_from([2, 8, 64])), generator=generator, dtype=torch.float64)
    x = x * 10.0 ** draw(st.integers(-3, 3)) + draw(st.sampled_from([0.0, 0.0, 1.0, -100.0, 3000.0]))
    x[0] = draw(st.sampled_from([0.0, 1.0, -7.25]))
    return x.to(dtype)


@pytest.mark.parametrize("policy", [8, 4])
@QUICK
@given(x=vectors())
def test_what_is_read_is_near_what_was_written(policy, x):
    codes, scales_zeros = quantise(x, policy, x)
    assert scales_zeros is not None
    assert scales_zeros.dtype is x.dtype
    got, want = read(codes, scales_zeros, policy), x.double().numpy()
    assert np.isfinite(got).all()
    step = scales_zeros[..., :1].double().numpy()
    largest = np.abs(want).max(-1, keepdims=True)
    # The bound that kv_quantisation states, and float32's own rounding on the way.
    bound = step / 2 + 1.5 * torch.finfo(x.dtype).eps * largest + 1e-6 * largest + 1e-7
    assert (np.abs(got - want) <= bound).all()
    spread = want.max(-1, keepdims=True) - want.min(-1, keepdims=True)
    finest = np.maximum(spread / (2**policy - 1), largest / 2**15)
    assert (step <= np.where(finest == 0, 1.0, finest * 1.01 + 1e-7)).all()  # and no coarser than needed
    # The package reads the same, rounded once to the dtype.
    again = dequantise(codes, policy, scales_zeros, torch.float64)
    np.testing.assert_allclose(again.numpy(), got, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", [8, 4])
def test_codes_are_lmdeploys(policy):
    """(x / scale + zero + 1/2) cut off, where that is not a tie in float32."""
    x = torch.randn(50, 3, 32)
    codes, _ = quantise(x, policy, x)
    wide = x.double().numpy()
    low, levels = wide.min(-1, keepdims=True), 2**policy - 1
    scale = (wide.max(-1, keepdims=True) - low) / levels
    exact = wide / scale - low / scale + 0.5
    raw = codes.numpy()
    if policy == 4:
        raw = np.concatenate([raw % 16, raw // 16], axis=-1)
    clear = np.abs(exact - np.round(exact)) > 1e-4
    assert clear.mean() > 0.99
    assert (raw == np.floor(exact).clip(0, levels))[clear].all()
    assert raw.min() == 0
    assert raw.max() == levels


def test_int4_keeps_the_first_half_of_a_head_in_the_low_bits():
    codes, scales_zeros = quantise(torch.tensor([0.0, 1.0, 2.0, 15.0]), 4, torch.zeros(1))
    assert codes.tolist() == [0 + 16 * 2, 1 + 16 * 15]
    assert scales_zeros is not None
    assert scales_zeros.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("policy", [16, 17])
def test_fp8_is_the_nearest_finite_number(policy):
    x = torch.cat(
        [torch.randn(2000) * 10.0 ** torch.randint(-4, 4, (2000,)), torch.tensor([0.0, 1e9, -1e9, torch.inf])]
    )
    codes, none = quantise(x, policy, torch.tensor(0.5))
    assert none is None
    got = read(codes, torch.tensor(0.5), policy)
    finite = TABLES[policy][np.isfinite(TABLES[policy])] * 0.5
    nearest = np.abs(x.double().numpy()[:-1, None] - finite).min(-1)
    np.testing.assert_array_equal(np.abs(got - x.double().numpy())[:-1], nearest)
    assert got[-1] == finite.max()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("policy", [8, 4])
def test_a_vector_that_is_not_finite_is_read_as_nan_and_others_as_they_are(policy, bad):
    x = torch.randn(3, 1, 8)
    x[1, 0, 3] = bad
    codes, scales_zeros = quantise(x, policy, x)
    assert scales_zeros is not None
    got = dequantise(codes, policy, scales_zeros, torch.float32)
    assert got[1].isnan().all()
    assert got[::2].isfinite().all()


@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
@pytest.mark.parametrize("policy", POLICIES)
def test_only_the_slots_that_are_named_are_written(policy, vendor_name):
    vendor.use(vendor_name)
    caches = new_caches((4, 8, 2), (16, 8), policy, torch.float32)
    before = [cache.clone() for cache in caches]
    slots = torch.tensor([9, -1, 31, 0])
    k, v = torch.randn(4, 2, 16), torch.randn(1, 4, 4, 8)[:, :, 1:3]  # strided, with a leading 1
    ops.fill_kv_cache(k, v, caches[0], caches[1], slots, caches[2], [caches[3]], quant_bits=policy)
    written = torch.zeros(32, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    for cache, was in zip(caches, before, strict=True):
        if cache.dim() == 4:
            assert torch.equal(_bytes(cache)[~written], _bytes(was)[~written])
        else:
            assert torch.equal(cache, was)  # the scale of fp8
    for cache, scales, new in ((caches[0], caches[2], k), (caches[1], caches[3], v[0])):
        held = read(cache, scales, policy).reshape(32, 2, -1)
        span = float(new.max() - new.min())
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert np.abs(held[slot] - new[token].numpy()).max() < span / 15


def _bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8).flatten(0, 1)


def test_a_slot_behind_the_end_leaves_everything_as_it_was():
    caches = new_caches((4, 8, 2), (16, 16), 8, torch.float32)
    k = torch.randn(2, 2, 16)
    with pytest.raises(OpArgumentError, match="slots below 32"):
        ops.fill_kv_cache(k, k, caches[0], caches[1], torch.tensor([0, 32]), caches[2], caches[3], 8)
    assert (caches[0] == 255).all()
    assert caches[2].isnan().all()


# --- reading


class QuantisedInputs(Inputs):
    """A batch over quantised caches; ``want`` attends to what numpy reads of them."""

    def __init__(self, batch: Any, policy: int) -> None:
        self.policy = policy
        super().__init__(batch)

    def _fill_pages(self, generator: torch.Generator) -> None:
        super()._fill_pages(generator)
        slots = (~self.k_cache.isnan().flatten(0, 1)[:, 0, 0]).nonzero()[:, 0]
        # Where the plain caches have which token, so that the same table serves.
        order = torch.tensor(
            [int((self.k_cache.flatten(0, 1)[s] == self.k).flatten(1).all(1).nonzero()[0, 0]) for s in slots]
        )
        blocks, block_size, heads = self.k_cache.shape[:3]
        shape = (blocks, block_size, heads)
        sizes = (self.batch.size, self.batch.size_v)
        caches = new_caches(shape, sizes, self.policy, self.batch.dtype)
        self.scales = caches[2:]
        ops.fill_kv_cache(
            self.k[order], self.v[order], *caches[:2], slots, *self.scales, quant_bits=self.policy
        )
        for name, cache, scales in zip(("k", "v"), caches, self.scales, strict=False):
            held = torch.from_numpy(read(cache, scales, self.policy)).flatten(0, 1)[slots]
            setattr(self, name, torch.empty_like(held).index_copy_(0, order, held).to(self.batch.dtype))
            setattr(self, f"{name}_cache", cache)

    def options(self) -> dict[str, Any]:
        return {"k_scales_zeros": self.scales[0], "v_scales_zeros": self.scales[1], "quant_bits": self.policy}

    def got(self, op: str) -> Tensor:
        batch = self.batch
        common: dict[str, Any] = {
            "softmax_scale": batch.scale,
            "attn_output": self.q[..., : batch.size_v] if batch.in_place else None,
            "head_size_v": None if batch.seed % 2 else batch.size_v,
            "sliding_window": batch.window,
            "logit_softcapping": batch.softcap,
            "alibi_slopes": self.slopes,
            "sinks": self.sinks,
            "causal": batch.causal,
        }
        pages = (self.k_cache, self.v_cache, self.table, batch.block_size)
        lengths = (self.q_ends, self.kv_lens)
        heads = (batch.heads, batch.kv_heads)
        longest = max(batch.kv_lens)
        if op == "paged_prefill_attention":
            new = (self.q, self.k, self.v, *pages, *lengths, max(batch.q_lens), longest)
            return ops.paged_prefill_attention(*new, *heads, [], **common, **self.options())
        return ops.paged_decode_attention(
            self.q, *pages, *lengths, longest, *heads, **common, **self.options()
        )


@pytest.mark.parametrize("vendor_name", ["cpu", pytest.param("reference", marks=pytest.mark.full)])
@pytest.mark.parametrize("op", ["paged_prefill_attention", "paged_decode_attention"])
@QUICK
@given(data=st.data(), policy=st.sampled_from(POLICIES))
def test_attention(op, vendor_name, data, policy):
    vendor.use(vendor_name)
    inputs = QuantisedInputs(data.draw(batches(op)), policy)
    want = inputs.want()
    got = inputs.got(op)
    assert got.dtype is inputs.batch.dtype
    cases.assert_close([got], [want], ops.registry()[op].tolerances[inputs.batch.dtype])


class LargestMade(TorchDispatchMode):
    """Notes the largest tensor that an op gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and func is not torch.ops.aten.view.default:
                self.elements = max(self.elements, one.numel())
        return result


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("decodes", [False, True], ids=["prefill", "decode"])
def test_no_more_is_widened_than_is_read(policy, decodes):
    """Of 256 blocks a sequence has 2."""
    k_cache, v_cache, *scales = new_caches((256, 16, 2), (16, 16), policy, torch.float32)
    table, ends, length = torch.tensor([[7, 200]]), torch.tensor([1]), torch.tensor([20])
    k = torch.randn(20, 2, 16)
    slots = torch.cat([7 * 16 + torch.arange(16), 200 * 16 + torch.arange(4)])
    ops.fill_kv_cache(k, k, k_cache, v_cache, slots, *scales, quant_bits=policy)
    q, options = (
        torch.randn(1, 4, 16),
        {"k_scales_zeros": scales[0], "v_scales_zeros": scales[1], "quant_bits": policy},
    )
    from dlinfer.vendor.cpu.kernels import KERNELS

    out = torch.empty(1, 4, 16)
    tail = (4, 2, out, 0.25, *(() if decodes else (True,)), -1, *(() if decodes else (-1,)), 0.0, None, None)
    with LargestMade() as made:
        if decodes:
            KERNELS["quantised_paged_decode_attention"](
                q, k_cache, v_cache, table, 16, length, 20, *tail, *scales, policy
            )
        else:
            KERNELS["quantised_paged_prefill_attention"](
                q, k_cache, v_cache, table, 16, ends, length, 1, 20, *tail, *scales, policy
            )
    assert made.elements <= 2 * 16 * 2 * 16
    want = ops.paged_decode_attention(q, k_cache, v_cache, table, 16, ends, length, 20, 4, 2, **options)
    torch.testing.assert_close(out, want)


def test_threads_write_and_read_caches_of_their_own():
    def work(seed: int, into: dict[int, Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        caches = new_caches((4, 16, 2), (16, 16), 8, torch.float32)
        k = torch.randn(40, 2, 16, generator=generator)
        options = {"k_scales_zeros": caches[2], "v_scales_zeros": caches[3], "quant_bits": 8}
        ops.fill_kv_cache(k, -k, *caches[:2], torch.arange(40), *caches[2:], quant_bits=8)
        length = torch.tensor([40])
        into[seed] = ops.paged_decode_attention(
            k[:1].repeat(1, 2, 1), *caches[:2], torch.arange(3)[None], 16, length, length, 40, 4, 2, **options
        )

    alone: dict[int, Tensor] = {}
    together: dict[int, Tensor] = {}
    for seed in range(6):
        work(seed, alone)
    threads = [threading.Thread(target=work, args=(seed, together)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(alone[seed], together[seed]) for seed in range(6))


# --- refused


def fill(policy: int = 8, **changes: Any) -> None:
    k_cache, v_cache, k_scales, v_scales = new_caches((4, 8, 2), (16, 16), policy, torch.float32)
    k = torch.randn(3, 2, 16)
    call: dict[str, Any] = {
        "k": k,
        "v": k,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "kv_start_indices": torch.arange(3),
        "k_scales_zeros": k_scales,
        "v_scales_zeros": v_scales,
        "quant_bits": policy,
    }
    ops.fill_kv_cache(**call | changes)


SHARED = torch.zeros(4, 8, 2, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"quant_bits": 42}, "quant_bits=42"),
        ({"quant_bits": 0}, "with scales"),
        ({"k_scales_zeros": []}, "without k_scales_zeros"),
        ({"v_scales_zeros": None}, "without k_scales_zeros"),
        ({"k_scales_zeros": [torch.ones(2), torch.ones(2)]}, "static scales"),
    ],
)
def test_other_formats_are_refused_by_name(changes, complaint):
    with pytest.raises(UnsupportedFeatureError, match="Next step") as caught:
        fill(**changes)
    assert "a quantised KV cache" in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "argument", "expected"),
    [
        ({"k_cache": torch.zeros(4, 8, 2, 16)}, "k_cache", "torch.uint8 for quant_bits=8"),
        ({"quant_bits": 16}, "k_cache", "float8_e4m3fn"),
        ({"quant_bits": 4}, "k_cache", "size 8 in dimension 3"),
        ({"v_scales_zeros": torch.zeros(4, 8, 2, 1)}, "v_scales_zeros", "a scale and a zero"),
        ({"v_scales_zeros": torch.zeros(4, 7, 2, 2)}, "v_scales_zeros", "the block size of v_cache"),
        ({"k_scales_zeros": torch.zeros(4, 8, 2, 2).half()}, "k_scales_zeros", "torch.float32 like k"),
        ({"k_scales_zeros": torch.ones(())}, "k_scales_zeros", "4 dimensions"),
        ({"k_cache": SHARED, "v_cache": SHARED}, "v_cache", "memory apart from k_cache"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes, argument, expected):
    with pytest.raises(OpArgumentError) as caught:
        fill(**changes)
    assert caught.value.fields["argument"] == argument
    assert expected in str(caught.value)


def test_an_fp8_cache_has_one_scale():
    fill(16)
    with pytest.raises(OpArgumentError, match="one scale"):
        fill(16, k_scales_zeros=torch.ones(2))
    with pytest.raises(OpArgumentError, match="a float32 scale"):
        fill(16, k_scales_zeros=torch.ones((), dtype=torch.bfloat16))


def test_an_odd_head_has_no_int4_cache():
    k = torch.randn(3, 2, 5)
    with pytest.raises(OpArgumentError, match="an even head size"):
        fill(4, k=k, v=k)
