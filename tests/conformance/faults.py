"""Faults of the kind that vendors make, each put into one kernel of a copy of the cpu vendor."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import KernelDeclined
from dlinfer.ops import registry
from dlinfer.ops.quantised import bf12
from dlinfer.vendor import Vendor, discovery

Made = Callable[[Callable[..., Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class Fault:
    """name: what is wrong. op: whose kernel. made: the wrong kernel, of the right one and the call's arguments by name.
    caught: the checks of which one has to fail."""

    name: str
    op: str
    made: Made
    caught: tuple[str, ...] = ("values",)


def vendor_with(fault: Fault) -> Vendor:
    """A copy of the cpu vendor, named "faulty", with a fault in it."""

    def kernels() -> Mapping[str, Callable[..., Any]]:
        right = dict(discovery.kernels_of(discovery.get("cpu")))
        return {**right, fault.op: _wrong(fault, right[fault.op])}

    return replace(discovery.get("cpu"), name="faulty", load_kernels=kernels)


def _wrong(fault: Fault, right: Callable[..., Any]) -> Callable[..., Any]:
    names = registry()[fault.op].parameters

    @functools.wraps(right)
    def kernel(*args: Any) -> Any:
        return fault.made(lambda **given: right(*given.values()), dict(zip(names, args, strict=True)))

    return kernel


# --- ways to be wrong


def told(**changes: Any) -> Made:
    """The right kernel, told something else: a value, or a function of what it should be told."""

    def made(right: Callable[..., Any], args: dict[str, Any]) -> Any:
        new = {name: one(args[name]) if callable(one) else one for name, one in changes.items()}
        return right(**{**args, **new})

    return made


def gives(change: Callable[..., Any]) -> Made:
    """The right results, changed; ``change`` takes what is returned."""
    return lambda right, args: change(right(**args))


def after(change: Callable[[dict[str, Any]], Any]) -> Made:
    """The right results, then something done with the arguments."""

    def made(right: Callable[..., Any], args: dict[str, Any]) -> Any:
        returned = right(**args)
        change(args)
        return returned

    return made


def in_bfloat16(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    """Computed with 8 bits, and given in the dtype that was asked for."""
    low = {
        name: one.bfloat16() if isinstance(one, Tensor) and one.dtype is torch.float32 else one
        for name, one in args.items()
    }
    return right(**low).to(args["x"].dtype)


_kept: list[Any] = []
_last: dict[str, Any] = {}
_calls = iter(range(10**9))


def _keeps(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    _kept.append(right(**args))
    return _kept[-1].clone()


def _reuses_a_buffer(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    """One result buffer for all threads, filled in two halves."""
    found = right(**args)
    buffer = _last.setdefault("buffer", torch.empty(1 << 20))
    view = buffer[: found.numel()]
    view.copy_(found.flatten())
    time.sleep(0.002)
    return view.view(found.shape).to(found.dtype).clone()


def _wrong_on_many_threads(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    found = right(**args)
    return found + 1 if torch.get_num_threads() > 4 else found


def _remembers_the_first(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    """Weights are packed once, by their shape."""
    key = tuple(args["weight"].shape), args["weight"].dtype
    return right(**{**args, "weight": _last.setdefault(str(key), args["weight"].clone())})


def _by_memory_order(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    """Rows are taken to lie one behind the other."""
    x = args["x"]
    dense = torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride()) if x.numel() else x
    return right(**{**args, "x": dense})


def _no_exceptions(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    """Numbers that have no code are taken for zeros."""
    rows, columns = args["out_features"], args["x"].shape[-1]
    words = bf12.packed_bytes(rows, columns) - 8 * (-(-rows // bf12.STRIP) + 1)
    weight = args["weight"][: bf12.packed_bytes(rows, columns)].clone()
    weight[words:] = 0  # where each strip's exceptions start
    return right(**{**args, "weight": weight})


def _window(more: int) -> Callable[[int], int]:
    return lambda window: window + more if window >= 0 else window


def _noise(result: Tensor) -> Tensor:
    return result * (1 + (next(_calls) % 2) * 1e-6)


def _declines(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    raise KernelDeclined(reason="not today")


def _raises(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    if next(iter(args.values())).numel() == 0:
        raise ZeroDivisionError("no rows")
    return right(**args)


def _fills_padding(args: dict[str, Any]) -> None:
    slots = args["kv_start_indices"]
    cache = args["k_cache"]
    for token in (slots < 0).nonzero().flatten().tolist():
        cache[0, 0] = args["k"][token]


def _unchecked_fill(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    """Slots behind the end wrap around."""
    cache = args["k_cache"]
    return right(**{**args, "kv_start_indices": args["kv_start_indices"] % (cache.shape[0] * cache.shape[1])})


def _fill_before_check(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    if args["k"].shape[0]:
        args["k_cache"][0, 0] = args["k_cache"][0, 0] + (args["kv_start_indices"].max() >= 32)
    return right(**args)


def _accumulates(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    """Adds to what stands in the output."""
    stood = args["attn_output"].clone()
    returned = right(**args)
    args["attn_output"].add_(stood * 0)
    return returned


def _reads_unused(args: dict[str, Any]) -> None:
    """Values of slots that nobody wrote are multiplied by a weight of zero."""
    args["attn_output"].add_(args["v_cache"].sum() * 0)


def _writes_beside(args: dict[str, Any]) -> None:
    """A whole vector is stored where the row ends within it."""
    out = args["out"]
    whole = torch.as_strided(out, (out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
    reach = out.storage_offset() + sum((n - 1) * s for n, s in zip(out.shape, out.stride(), strict=True)) + 1
    whole[reach : reach + 1] = 0


def _float_count(right: Callable[..., Any], args: dict[str, Any]) -> Any:
    """Slots are counted in float16."""
    slots = args["kv_start_indices"]
    return right(**{**args, "kv_start_indices": slots.half().to(slots.dtype).clamp(max=1 << 17)})


FAULTS = (
    # numbers
    Fault("a norm forgets eps", "rms_norm", told(eps=1e-30)),
    Fault("a norm computes in bfloat16", "rms_norm", in_bfloat16),
    Fault("a norm forgets the weight", "rms_norm", told(weight=torch.ones_like)),
    Fault(
        "the new residual is the old one",
        "add_rms_norm",
        lambda right, a: (right(**a)[0], a["residual"].clone()),
    ),
    Fault("a bias is dropped", "linear", told(bias=None)),
    Fault("gate and up are exchanged", "silu_and_mul", told(x=lambda x: torch.cat(x.chunk(2, -1)[::-1], -1))),
    Fault("the tanh gelu is the exact one", "gelu_mul", told(tanh=lambda tanh: not tanh)),
    Fault("rotation turns the other way", "apply_rotary_pos_emb", told(sin=torch.neg)),
    Fault("routed weights are not normalised", "fused_moe", told(renormalize=lambda one: not one)),
    Fault("a router chooses the smallest", "moe_gating_topk_softmax", told(router_logits=torch.neg)),
    Fault("zero points are left out", "weight_quant_matmul", told(offset=None)),
    Fault("numbers without a code are lost", "linear_bf12", _no_exceptions),
    Fault(
        "codes are four steps up",
        "dynamic_quant",
        gives(lambda found: ((found[0].view(torch.uint8) + 4).view(found[0].dtype), *found[1:])),
    ),
    # attention
    Fault("the softmax scale is 1", "prefill_attention", told(softmax_scale=1.0)),
    Fault("a window shows one key more", "paged_prefill_attention", told(window_left=_window(1))),
    Fault(
        "a window shows one key less",
        "paged_decode_attention",
        told(window_left=lambda w: max(w - 1, 0) if w >= 0 else w),
    ),
    Fault("soft-capping is ignored", "paged_decode_attention", told(logit_softcapping=0.0)),
    Fault("sinks are ignored", "prefill_attention", told(sinks=None)),
    Fault("alibi is ignored", "paged_prefill_attention", told(alibi_slopes=None)),
    Fault("causality is ignored", "paged_prefill_attention", told(causal=False)),
    Fault(
        "the last key of a full block is lost",
        "paged_decode_attention",
        told(kv_seqlens=lambda n: n - (n % 8 == 0).to(n.dtype) * (n > 0)),
    ),
    Fault("lengths are 16 bits", "paged_decode_attention", told(kv_seqlens=lambda n: n % (1 << 16))),
    Fault(
        "lengths of long prompts are 16 bits",
        "paged_prefill_attention",
        told(kv_seqlens=lambda n: n % (1 << 16) + (n % (1 << 16) == 0) * (n > 0) * 2),
    ),
    Fault("slots are counted in half precision", "fill_kv_cache", _float_count),
    Fault("slots that nobody wrote are read", "paged_decode_attention", after(_reads_unused)),
    Fault("the output is added to", "paged_decode_attention", _accumulates, ("outputs",)),
    Fault(
        "an int4 cache is read as int8",
        "quantised_paged_decode_attention",
        told(k_scales_zeros=lambda one: one + 0.5),
    ),
    # states and slots
    Fault("padding is written", "fill_kv_cache", after(_fills_padding)),
    Fault("slots behind the end wrap around", "fill_kv_cache", _unchecked_fill, ("indices",)),
    Fault("a cache is written before slots are looked at", "fill_kv_cache", _fill_before_check, ("indices",)),
    Fault("a fresh sequence gets the old state", "causal_conv1d", told(fresh=torch.zeros_like)),
    Fault("states are not kept", "gated_delta_rule", told(recurrent_state=torch.clone)),
    # memory
    Fault(
        "a result is an argument",
        "rms_norm",
        lambda right, a: a["x"].copy_(right(**a)) if a["x"].is_contiguous() else right(**a),
        ("aliasing", "mutation"),
    ),
    Fault(
        "two results are one tensor",
        "linears",
        gives(
            lambda found: (
                [*found[:-1], found[0]] if len(found) > 1 and found[0].shape == found[-1].shape else found
            )
        ),
        ("values", "aliasing"),
    ),
    Fault("an input is scratch", "silu_and_mul", after(lambda a: a["x"].zero_()), ("mutation",)),
    Fault("it writes beside its output", "causal_conv1d", after(_writes_beside), ("views",)),
    Fault("strides are ignored", "rms_norm", _by_memory_order, ("values", "views", "turned")),
    Fault("results are kept for ever", "silu_and_mul", _keeps, ("leaks",)),
    # shapes
    Fault("a result is wider than asked", "rms_norm", gives(lambda found: found.double()), ("fake",)),
    Fault(
        "a result lies otherwise than the fake says",
        "linear",
        gives(lambda found: found.mT.contiguous().mT if found.dim() > 1 else found),
        ("fake",),
    ),
    Fault(
        "one of two results is missing", "add_rms_norm", gives(lambda found: found[:1]), ("schema", "values")
    ),
    # calls
    Fault("an empty call raises", "silu_and_mul", _raises),
    Fault("a claimed op is declined", "linear", _declines),
    Fault("the same call gives other bits", "linear", gives(_noise), ("determinism",)),
    Fault("many threads give other numbers", "silu_and_mul", _wrong_on_many_threads, ("threads",)),
    Fault("callers share a buffer", "linear", _reuses_a_buffer, ("threads",)),
    Fault("weights are remembered by shape", "linear", _remembers_the_first, ("again",)),
)
