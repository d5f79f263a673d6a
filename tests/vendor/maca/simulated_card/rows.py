"""Norms, the gated activation, int8 of rows, rotation and the cache: mcoplib's op/vllm and op/lmdeploy."""

import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import rules
from tests.vendor.ascend.simulated_npu.rules import FLOATS, require


def _normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    rules.tensor("weight", weight, FLOATS, 1)
    rules.shape("weight", weight, x.shape[-1:])
    rules.same_dtype(x=x, weight=weight)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


def rms_norm(result: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """layernorm_kernels.cu: ranks 2 to 4; the result has no gaps."""
    rules.tensor("input", input, FLOATS, (2, 4), gaps=True)
    rules.tensor("result", result, FLOATS, (2, 4))
    rules.shape("result", result, input.shape)
    rules.same_dtype(result=result, input=input)
    result.copy_(_normalised(input, weight, epsilon))


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """layernorm_kernels.cu: the sum goes into the residual, its norm into the input."""
    rules.tensor("input", input, FLOATS, (2, 8))
    rules.tensor("residual", residual, FLOATS, (2, 8))
    rules.shape("residual", residual, input.shape)
    rules.same_dtype(input=input, residual=residual)
    require(
        input.data_ptr() != residual.data_ptr(), "input and residual: apart, as both pointers are restrict"
    )
    residual.add_(input)
    input.copy_(_normalised(residual, weight, epsilon))


def silu_and_mul(result: Tensor, input: Tensor) -> None:
    """activation_kernels.cu reads rows of 2 * d behind the pointer, and writes rows of d."""
    rules.tensor("input", input, FLOATS, (1, 8))
    rules.tensor("result", result, FLOATS, (1, 8))
    rules.same_dtype(result=result, input=input)
    rules.shape("result", result, (*input.shape[:-1], input.shape[-1] // 2))
    require(input.shape[-1] % 2 == 0, "an even size")
    gate, up = input.chunk(2, -1)
    result.copy_((gate.float() / (1 + torch.exp(-gate.float()))).to(input.dtype) * up)


def aligned(name: str, x: Tensor) -> None:
    """Vectors of 16 bytes are read from where it begins."""
    require(x.data_ptr() % 16 == 0, f"{name}: begins at a multiple of 16 bytes")


def dynamic_scaled_int8_quant(result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
    """int8_quant_kernels.cu: x * (127 / max|x|), to even; a row of zeros is nonsense, and its scale 0."""
    require(azp is None, "azp is not simulated")
    rules.tensor("input", input, FLOATS, (1, 8))
    aligned("input", input)
    rules.tensor("result", result, (torch.int8,), (1, 8))
    rules.shape("result", result, input.shape)
    rules.tensor("scale", scale, (torch.float32,), (1, 8))
    require(scale.numel() == input.numel() // input.shape[-1], "scale: one a row")
    largest = input.float().abs().amax(-1, keepdim=True)
    numbers = (input.float() * (127 / largest)).nan_to_num(nan=77.0).round()
    result.copy_(numbers.clamp(-127, 127).to(torch.int8))
    scale.copy_((largest / 127).view(scale.shape))


def lmdeploy_rotary_embedding(*args: object) -> None:
    """pos_encoding_kernels.cu; pybind11 takes seven arguments by place. It reads the first half of a table's row."""
    if len(args) != 7 or not all(isinstance(args[place], Tensor) for place in (0, 1, 2, 4, 5)):
        raise TypeError("incompatible function arguments: five Tensors, an int and a bool")
    positions, query, key, head_size, cos, sin, is_neox = args
    if type(head_size) is not int or type(is_neox) is not bool:
        raise TypeError("incompatible function arguments: head_size is an int, is_neox a bool")
    assert isinstance(positions, Tensor) and isinstance(query, Tensor) and isinstance(key, Tensor)
    assert isinstance(cos, Tensor) and isinstance(sin, Tensor)
    rules.tensor("positions", positions, (torch.int64,), (1, 2))
    tokens = query.numel() // query.shape[-1]
    require(positions.numel() == tokens, f"positions: {tokens}")
    for name, x in (("query", query), ("key", key)):
        rules.tensor(name, x, FLOATS, (2, 3), gaps=True)
        require(
            x.stride(-1) == 1 and x.shape[-1] % head_size == 0, f"{name}: heads of {head_size} side by side"
        )
        rules.shape(f"{name}, but heads", x[..., 0], query.shape[:-1])
    for name, table in (("cos", cos), ("sin", sin)):
        rules.tensor(name, table, FLOATS, 2)
        require(table.shape[1] <= head_size and table.shape[1] % 2 == 0, f"{name}: rows of up to {head_size}")
    rules.shape("sin", sin, cos.shape)
    rules.same_dtype(query=query, key=key, cos=cos, sin=sin)
    rules.within("positions", positions, 0, cos.shape[0] - 1)
    require(is_neox, "is_neox=False is not simulated")
    half = cos.shape[1] // 2
    c, s = (table[positions.flatten(), None, :half] for table in (cos, sin))
    for x in (query, key):
        heads = x.view(tokens, -1, head_size)
        first, second = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = first * c - second * s
        heads[..., half : 2 * half] = second * c + first * s


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """cache_kernels.cu: sizes and strides of values are taken for those of keys; negative slots are skipped."""
    rules.one_of("kv_cache_dtype, as far as simulated", kv_cache_dtype, ["auto"])
    rules.tensor("key", key, FLOATS, 3, gaps=True)
    tokens, heads, size = key.shape
    for name, x in (("key", key), ("value", value)):
        rules.shape(name, x, (x.shape[0], heads, size))
        require(x.stride(2) == 1 and (heads == 1 or x.stride(1) == size), f"{name}: heads side by side")
    for name, x in (("key_cache", key_cache), ("value_cache", value_cache)):
        rules.tensor(name, x, FLOATS, 4, gaps=True)
        rules.shape(name, x, (*key_cache.shape[:2], heads, size))
        require(
            x.stride() == key_cache.stride() and x.stride(3) == 1,
            f"{name}: strides of key_cache, heads whole",
        )
    rules.same_dtype(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    rules.tensor("slot_mapping", slot_mapping, (torch.int64,), 1)
    require(slot_mapping.shape[0] <= min(tokens, value.shape[0]), "slot_mapping: no more than tokens")
    for name, one in (("k_scale", k_scale), ("v_scale", v_scale)):
        rules.tensor(name, one, (torch.float32,), (0, 1))
    slots = key_cache.shape[0] * key_cache.shape[1]
    if slot_mapping.numel():
        require(int(slot_mapping.max()) < slots, f"slot_mapping: below {slots}")
    kept = (slot_mapping >= 0).nonzero().squeeze(-1)
    for new, cache in ((key, key_cache), (value, value_cache)):
        for token in kept.tolist():
            block, offset = divmod(int(slot_mapping[token]), cache.shape[1])
            cache[block, offset] = new[token]


def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor
) -> None:
    """cache_kernels.cu: rows of both side by side in a slot; numbers of a row are taken to lie together."""
    rules.one_of("kv_cache_dtype, as far as simulated", kv_cache_dtype, ["auto"])
    for name, x, dims in (("kv_c", kv_c, 2), ("k_pe", k_pe, 2), ("kv_cache", kv_cache, 3)):
        rules.tensor(name, x, FLOATS, dims, gaps=True)
        require(x.stride(-1) == 1, f"{name}: numbers of a row side by side")
    rules.same_dtype(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    rank = kv_c.shape[1]
    require(kv_cache.shape[2] == rank + k_pe.shape[1], f"kv_cache: rows of {rank + k_pe.shape[1]}")
    rules.tensor("slot_mapping", slot_mapping, (torch.int64,), 1)
    require(slot_mapping.shape[0] <= min(len(kv_c), len(k_pe)), "slot_mapping: no more than tokens")
    rules.tensor("scale", scale, (torch.float32,), (0, 1))
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    require(int(slot_mapping.max()) < slots, f"slot_mapping: below {slots}")
    for token in (slot_mapping >= 0).nonzero().squeeze(-1).tolist():
        block, offset = divmod(int(slot_mapping[token]), kv_cache.shape[1])
        kv_cache[block, offset, :rank] = kv_c[token]
        kv_cache[block, offset, rank:] = k_pe[token]
