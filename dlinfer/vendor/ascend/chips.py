"""Differences between generations of cards, according to the documents in torch_npu 2.13.0 (``_op_plugin_docs.py``)."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from dlinfer.vendor.ascend import sdk


@dataclass(frozen=True)
class Chip:
    """A generation of cards, and what its ops can do.

    name: for messages. prefixes: beginnings of the cards' names in ``torch.npu.get_device_name()``.
    versions: its first and last number in ``torch.npu.get_soc_version()``; None: only names identify it.
    floats: dtypes that models may compute in.
    fused_attention: it has npu_fused_infer_attention_score and npu_scatter_pa_kv_cache.
    routing: it has npu_moe_init_routing_v2, npu_moe_token_unpermute and quantised npu_grouped_matmul.
    token_scales: npu_quant_matmul takes a scale for each token; npu_dynamic_quant and the fused norm return one.
    packed_weights: npu_weight_quant_batchmatmul takes groups and 4 bits.
    sparse_attention: it has npu_lightning_indexer and npu_sparse_flash_attention.
    swiglu: it has npu_swiglu.
    rope_sizes: the head sizes of npu_apply_rotary_pos_emb, which rotates in place. npu_rotary_mul serves all others.
    """

    name: str
    prefixes: tuple[str, ...]
    versions: tuple[int, int] | None
    floats: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    fused_attention: bool = True
    routing: bool = True
    token_scales: bool = True
    packed_weights: bool = True
    sparse_attention: bool = True
    swiglu: bool = True
    rope_sizes: tuple[int, ...] = (64, 128)


A2 = Chip("Atlas A2 (910B)", ("Ascend910B",), (220, 225))
A3 = replace(A2, name="Atlas A3 (910_93)", prefixes=("Ascend910_93", "Ascend910"), versions=(250, 255))
DUO = Chip(
    "Atlas inference series (310P)",
    ("Ascend310P",),
    None,
    floats=(torch.float16, torch.float32),
    fused_attention=False,
    routing=False,
    token_scales=False,
    packed_weights=False,
    sparse_attention=False,
    swiglu=False,
)
UNKNOWN = replace(A2, name="an unknown card (treated as Atlas A2)", prefixes=(), versions=None)
CHIPS = (A2, A3, DUO)


def named(device_name: str, soc_version: int | None = None) -> Chip:
    """Return the generation of a card, by its SoC number or, if the number is None or unknown, by its name."""
    for chip in CHIPS:
        if soc_version is not None and chip.versions and chip.versions[0] <= soc_version <= chip.versions[1]:
            return chip
    for chip in CHIPS:
        if device_name.startswith(chip.prefixes):
            return chip
    return UNKNOWN


@cache
def current() -> Chip:
    """Return the generation of this machine's cards. A process has cards of one generation only."""
    npu = sdk.cards()
    version = getattr(npu, "get_soc_version", None)
    return named(npu.get_device_name(), version() if version is not None else None)
