"""Two tiny language models as folders, and what transformers makes of a prompt."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 256
STAGES = (8, 16)
CAPACITY = 32


OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},  # biases of queries, keys and values
    "qwen3": {"head_dim": 32},  # heads wider than hidden / heads, and norms of queries and keys
    "mistral": {"head_dim": 16, "sliding_window": CAPACITY},  # the smallest window that is taken
}
"""What kinds of models have of their own."""


def head_size(kind: str) -> int:
    """Of a model that ``write`` makes."""
    return OWN[kind].get("head_dim", 16)


def write(kind: str, folder: Path) -> Path:
    """A model of a kind, of two layers; weights as far from 0 as trained ones are from noise."""
    import transformers

    name = kind.capitalize()
    config_of, model_of = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    settings = {"tie_word_embeddings": False} | OWN[kind]
    config = config_of(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )
    torch.manual_seed(7)
    model = model_of(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return folder


def prompt(length: int) -> list[int]:
    return [(index * 37 + 11) % VOCABULARY for index in range(length)]


def by_transformers(folder: Path, given: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """(greedy tokens, logits [count, vocabulary] float32)."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        made = model.generate(
            torch.tensor([given]),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return made.sequences[0, len(given) :].tolist(), torch.stack(made.logits)[:, 0]
