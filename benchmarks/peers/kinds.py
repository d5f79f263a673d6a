"""The kinds of models that are measured, and what of the benchmark can read each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import FOLDER, MOE_FOLDER, MOE_SHAPE, qwen2_half_billion, qwen3_moe
from benchmarks.peers.entries import PEERS, PRECISIONS


@dataclass(frozen=True)
class Kind:
    """title: of its section in the document. weights_read: the part of the checkpoint that a decoding step of one
    sequence reads. transformers: the contenders of that library, by their names."""

    title: str
    make: Callable[[Path], Path]
    folder: Path
    peers: tuple[str, ...]
    precisions: tuple[str, ...]
    works: tuple[str, ...]
    transformers: dict[str, str]
    weights_read: float = 1.0


def _read_of_experts() -> float:
    """By how much the weights that a token's experts have are fewer than those of all."""
    hidden, layers = MOE_SHAPE["hidden_size"], MOE_SHAPE["num_hidden_layers"]
    heads = MOE_SHAPE["num_attention_heads"] + MOE_SHAPE["num_key_value_heads"]
    expert = 3 * hidden * MOE_SHAPE["moe_intermediate_size"]
    shared = 2 * heads * MOE_SHAPE["head_dim"] * hidden + MOE_SHAPE["num_experts"] * hidden
    head = MOE_SHAPE["vocab_size"] * hidden

    def total(experts: int) -> int:
        return layers * (experts * expert + shared) + head

    return total(MOE_SHAPE["num_experts_per_tok"]) / total(MOE_SHAPE["num_experts"])


KINDS = {
    "dense": Kind(
        "Shape of Qwen2.5-0.5B",
        qwen2_half_billion,
        FOLDER,
        PEERS,
        PRECISIONS,
        ("prefill-512", "prefill-2048", "decode-1", "decode-8"),
        {"transformers": "hf-eager", "inductor": "hf-inductor-freezing"},
    ),
    # gguf_file.py writes no experts. What inductor makes of transformers' experts, a graph an expert, is no peer.
    "moe": Kind(
        "A mixture of experts, Qwen3-MoE's shape in small",
        qwen3_moe,
        MOE_FOLDER,
        ("genai", "transformers"),
        ("bf16",),
        ("prefill-512", "decode-1", "decode-8"),
        {"transformers": "hf-eager"},
        _read_of_experts(),
    ),
}
