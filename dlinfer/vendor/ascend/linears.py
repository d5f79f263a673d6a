"""Matrix products with weights of the model's dtype, of 8 bits and of 4 bits, and the sum over ranks by HCCL."""

import weakref
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from dlinfer.ops.collective.groups import ALONE, process_group
from dlinfer.ops.quantised.packing import AWQ
from dlinfer.vendor.ascend import chips, layouts, refusing
from dlinfer.vendor.base import refuses


@refuses(lambda x, weight, bias: refusing.floating(x))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, layouts.weight(weight), bias)


def _refuses_w8a8(call: Any, weight: Tensor) -> str | None:
    chip = chips.current()
    if call.out_dtype not in refusing.HALVES or call.out_dtype not in chip.floats:
        return f"npu_quant_matmul returns float16 or bfloat16, not {call.out_dtype}"
    return refusing.first(
        (
            refusing.lacking(chip.token_scales, "per-token scales in npu_quant_matmul"),
            refusing.eight_bits(call.quant_dtype),
            refusing.sizes(*weight.shape),
        )
    )


@refusing.where(lambda call: _refuses_w8a8(call, call.b))
def linear_w8a8(
    a: Tensor,
    b: Tensor,
    rms_scale: Tensor,
    linear_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    shape = (*a.shape[:-1], b.shape[0])
    if 0 in shape or a.numel() == 0:
        return a.new_zeros(shape, dtype=out_dtype)
    out = torch.ops.npu.npu_quant_matmul(
        layouts.rows(a),
        layouts.weight(b.contiguous()).t(),
        linear_scale.reshape(-1).float().contiguous(),
        pertoken_scale=rms_scale.reshape(-1).float().contiguous(),
        bias=None if bias is None else bias.contiguous(),
        output_dtype=out_dtype,
    )
    return out.view(shape)


@refusing.where(lambda call: refusing.floating(call.x) or _refuses_w8a8(call, call.weight))
def linear_w8a8_static(
    x: Tensor,
    weight: Tensor,
    input_scale: Tensor,
    input_offset: Tensor,
    deq_scale: Tensor,
    out_dtype: torch.dtype,
    quant_dtype: torch.dtype,
    quant_bias: Tensor | None,
) -> Tensor:
    shape = (*x.shape[:-1], weight.shape[0])
    if 0 in shape or x.numel() == 0:
        return x.new_zeros(shape, dtype=out_dtype)
    numbers = torch.ops.npu.npu_quantize(
        layouts.rows(x), input_scale.float(), input_offset, torch.qint8, axis=-1, div_mode=True
    )
    out = torch.ops.npu.npu_quant_matmul(
        numbers,
        layouts.weight(weight.contiguous()).t(),
        deq_scale.reshape(-1).float().contiguous(),
        bias=None if quant_bias is None else quant_bias.contiguous(),
        output_dtype=out_dtype,
    )
    return out.view(shape)


# --- 4 bits


def _refuses_four_bits(x: Tensor, qweight: Tensor, scales: Tensor, group_size: int) -> str | None:
    in_features, out_features = qweight.shape[0], scales.shape[1]
    grouped = 0 < group_size < in_features
    if grouped and (group_size % 32 or group_size < 32):
        return f"npu_weight_quant_batchmatmul needs a group size that is a multiple of 32, not {group_size}"
    return refusing.first(
        (
            refusing.lacking(chips.current().packed_weights, "4-bit weights"),
            refusing.floating(x, refusing.HALVES),
            refusing.sizes(in_features, out_features),
        )
    )


@refuses(
    lambda x, qweight, scales, offset, bias, group_size: _refuses_four_bits(x, qweight, scales, group_size)
)
def weight_quant_matmul(
    x: Tensor, qweight: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    shape = (*x.shape[:-1], scales.shape[1])
    if 0 in shape or x.numel() == 0:
        empty = x.new_zeros(shape)
        return empty if bias is None else empty + bias.to(x.dtype)
    words, steps, zeros = _PREPARED.of(x.dtype, qweight, scales, offset)
    out = torch.ops.npu.npu_weight_quant_batchmatmul(
        layouts.rows(x),
        words,
        steps,
        antiquant_offset=zeros,
        bias=None if bias is None else bias.to(_BIAS[x.dtype]).contiguous(),
        antiquant_group_size=group_size if steps.shape[0] > 1 else 0,
    )
    return out.view(shape)


_BIAS = {torch.float16: torch.float16, torch.bfloat16: torch.float32}
"""Maps the dtype of x to the dtype of the bias."""

Prepared = tuple[Tensor, Tensor, Tensor]


class _PreparedWeights:
    """AWQ's weights in the vendor's format, made at the first call and kept as long as the checkpoint's tensor exists.

    A checkpoint's weight is (q - zero) * scale, with q from 0 to 15. The vendor computes (n + offset) * scale, with a
    signed n. So n is q - 8, and offset is 8 - zero.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], tuple[list[weakref.ref[Tensor]], list[int], Prepared]] = {}

    def of(self, dtype: torch.dtype, qweight: Tensor, scales: Tensor, offset: Tensor | None) -> Prepared:
        """Return three tensors: packed n [in, out / 8], scales [groups, out] and offsets [groups, out].

        offset: the checkpoint's packed zero points. None means that every zero is 8, so all returned offsets are 0.
        """
        parts = [part for part in (qweight, scales, offset) if part is not None]
        key, versions = (id(qweight), dtype), [layouts.version(part) for part in parts]
        entry = self._kept.get(key)
        if entry is not None and entry[1] == versions and _same(entry[0], parts):
            return entry[2]
        packed = self._make(dtype, qweight, scales, offset)
        first = weakref.ref(qweight, lambda _: self._kept.pop(key, None))
        self._kept[key] = [first, *map(weakref.ref, parts[1:])], versions, packed
        return packed

    def _make(self, dtype: torch.dtype, qweight: Tensor, scales: Tensor, offset: Tensor | None) -> Prepared:
        numbers = (AWQ.unpack(qweight) - AWQ.middle).contiguous()
        words = torch.ops.npu.npu_convert_weight_to_int4pack(numbers)
        steps = scales.to(dtype).contiguous()
        if offset is None:
            return words, steps, torch.zeros_like(steps)
        zeros = (AWQ.middle - AWQ.unpack_zeros(offset)).to(dtype).contiguous()
        return words, steps, zeros


def _same(kept: list[weakref.ref[Tensor]], parts: list[Tensor]) -> bool:
    return len(kept) == len(parts) and all(
        reference() is part for reference, part in zip(kept, parts, strict=True)
    )


_PREPARED = _PreparedWeights()


def all_reduce(x: Tensor, group: int) -> None:
    if group == ALONE:
        return
    packed = x.contiguous()
    distributed.all_reduce(packed, group=process_group(group))  # pyright: ignore[reportUnknownMemberType]
    if packed is not x:
        x.copy_(packed)
