"""Maps the tensors of a GGUF file to those of a checkpoint in Hugging Face's format.

llama.cpp renames tensors, stacks the experts of a layer, stores Gemma's norms plus one, and reorders the rows of q and
k of Llama: Hugging Face rotates number i of a head with number i + size / 2, llama.cpp with its neighbour. All of this
is undone here. Blocks lie along rows, so that their bytes can be reordered by rows as they are.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dlinfer.framework.lmdeploy_ext.gguf.reader import Entry, Header, unusable

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
_SKIPPED = ("rope_freqs.weight",)  # ``config`` reads it

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_FAMILY = {
    "llama": _PARTS | _MIXTRAL,
    "qwen2moe": _PARTS | _EXPERTS,
    "qwen3moe": _PARTS | _EXPERTS,
    "gemma2": _PARTS | _GEMMA,
    "gemma3": _PARTS | _GEMMA,
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Source:
    """Where a tensor of the checkpoint is in a GGUF file.

    name: the checkpoint's name of the tensor. entry: its bytes; of an expert, those of that expert alone.
    paired_heads: the number of heads whose rows have to be reordered; 0 for most tensors.
    minus_one: whether the file stores the numbers plus one.
    """

    name: str
    entry: Entry
    paired_heads: int = 0
    minus_one: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def row_order(self) -> np.ndarray | None:
        """Return the rows of the file in the checkpoint's order; None if the order is the same."""
        if not self.paired_heads:
            return None
        rows = np.arange(self.shape[0]).reshape(self.paired_heads, -1, 2)
        return rows.swapaxes(1, 2).reshape(-1)


def sources(header: Header) -> dict[str, Source]:
    """Return the checkpoint's name -> source of all tensors of a GGUF file.

    Raises ModelFolderError for a tensor that the architecture does not have.
    """
    return {source.name: source for entry in header.tensors.values() for source in _sources(header, entry)}


def _sources(header: Header, entry: Entry) -> Iterator[Source]:
    family, metadata = header.architecture, header.metadata
    minus_one = family.startswith("gemma") and entry.name.endswith("norm.weight")
    if entry.name in _WHOLE:
        yield Source(_WHOLE[entry.name], entry, minus_one=minus_one)
        return
    match = _BLOCK.fullmatch(entry.name)
    target = _OF_FAMILY.get(family, _PARTS).get(match[2]) if match else None
    if match is None or target is None:
        if entry.name in _SKIPPED:
            return
        detail = f"its tensor {entry.name} has no place in a model of architecture {family!r}"
        raise unusable(header.path, detail, "use the model in the format of Hugging Face")
    name = f"model.layers.{match[1]}.{target}.{match[3]}"
    if "{}" in name:
        for expert in range(entry.shape[0]):
            part = replace(entry, shape=entry.shape[1:])
            yield Source(name.format(expert), replace(part, begin=entry.begin + expert * part.nbytes))
        return
    if match[2] == "ffn_gate_inp_shexp":
        entry = replace(entry, shape=(1, entry.shape[-1]))
    heads = 0
    if family == "llama" and match[2] in ("attn_q", "attn_k"):
        queries = metadata["llama.attention.head_count"]
        heads = queries if match[2] == "attn_q" else metadata.get("llama.attention.head_count_kv", queries)
        heads = heads[int(match[1])] if isinstance(heads, list) else heads
        if entry.shape[0] % (2 * heads):
            raise unusable(
                header.path, f"its tensor {entry.name} has {entry.shape[0]} rows for {heads} heads"
            )
    yield Source(name, entry, heads, minus_one)
