"""The models that serving is measured with, of random weights: the shape of Qwen2.5-0.5B, and a small Qwen3-MoE."""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MOE_SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Qwen3-30B-A3B's proportions: 0.44 billion weights, of which a token's layers read 0.07."""

FOLDER = Path.home() / ".cache" / "dlinfer-bench" / "qwen2-0.5b"
MOE_FOLDER = FOLDER.with_name("qwen3-moe-0.4b")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """``--model`` and ``--dtype``, as ``chosen_model`` reads them."""
    parser.add_argument(
        "--model", type=Path, default=FOLDER, help="folder of the checkpoint, made if need be"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default=usual_dtype(),
        help="of its weights; by default bfloat16 where the CPU multiplies it, else float32",
    )


def usual_dtype() -> str:
    """bfloat16 on CPUs that multiply it; elsewhere torch does so in software, a hundred times slower than float32."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32"


def chosen_model(args: argparse.Namespace) -> Path:
    """The folder of the checkpoint that the options choose."""
    if args.dtype == "bfloat16":
        return qwen2_half_billion(args.model)
    return qwen2_half_billion(args.model.with_name(f"{args.model.name}-{args.dtype}"), args.dtype)


def qwen2_half_billion(folder: Path, dtype: str = "bfloat16") -> Path:
    """A checkpoint of ``SHAPE`` in ``folder``, made at the first call: 1 GB in bfloat16, some 30 seconds."""
    return _made("Qwen2ForCausalLM", SHAPE, folder, dtype)


def qwen3_moe(folder: Path, dtype: str = "bfloat16") -> Path:
    """A checkpoint of ``MOE_SHAPE``, likewise: 0.9 GB."""
    return _made("Qwen3MoeForCausalLM", MOE_SHAPE, folder, dtype)


def _made(name: str, shape: dict[str, Any], folder: Path, dtype: str) -> Path:
    """A checkpoint of transformers' class of that name, unless it is there."""
    if (folder / "shape.json").is_file() and json.loads((folder / "shape.json").read_text()) == shape:
        return folder
    import torch
    import transformers

    from examples.tiny_models.build import build

    folder.parent.mkdir(parents=True, exist_ok=True)
    tiny = folder.parent / "tokenizer-of-tiny-qwen2"
    build("qwen2", tiny, 0, "float32")
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        model_class = getattr(transformers, name)
        model = model_class(model_class.config_class(**shape, dtype=dtype))
    finally:
        torch.set_default_dtype(torch.float32)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temp:
        new = Path(temp) / "model"
        model.save_pretrained(new)
        for pattern in ("tokenizer*", "chat_template*"):
            for path in tiny.glob(pattern):
                shutil.copy(path, new)
        (new / "shape.json").write_text(json.dumps(shape))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(new, folder)
    return folder
