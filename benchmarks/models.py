"""The model that serving is measured with: the shape of Qwen2.5-0.5B in bfloat16, with random weights."""

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


def qwen2_half_billion(folder: Path) -> Path:
    """A checkpoint of that shape in ``folder``, made at the first call: 1 GB, some 30 seconds."""
    if (folder / "shape.json").is_file() and json.loads((folder / "shape.json").read_text()) == SHAPE:
        return folder
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.tiny_models.build import build

    folder.parent.mkdir(parents=True, exist_ok=True)
    tiny = folder.parent / "tokenizer-of-tiny-qwen2"
    build("qwen2", tiny, 0, "float32")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, dtype="bfloat16"))
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
