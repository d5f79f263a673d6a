"""The model that serving is measured with: the shape of Qwen2.5-0.5B, with random weights."""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

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


FOLDER = Path.home() / ".cache" / "dlinfer-bench" / "qwen2-0.5b"


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
    """A checkpoint of that shape in ``folder``, made at the first call: 1 GB in bfloat16, some 30 seconds."""
    if (folder / "shape.json").is_file() and json.loads((folder / "shape.json").read_text()) == SHAPE:
        return folder
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.tiny_models.build import build

    folder.parent.mkdir(parents=True, exist_ok=True)
    tiny = folder.parent / "tokenizer-of-tiny-qwen2"
    build("qwen2", tiny, 0, "float32")
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, dtype=dtype))
    finally:
        torch.set_default_dtype(torch.float32)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temp:
        new = Path(temp) / "model"
        model.save_pretrained(new)
        for pattern in ("tokenizer*", "chat_template*"):
            for path in tiny.glob(pattern):
                shutil.copy(path, new)
        (new / "shape.json").write_text(json.dumps(SHAPE))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(new, folder)
    return folder
