"""A Qwen2 checkpoint as llama.cpp reads it, run in its environment (numpy and gguf).

    python -m benchmarks.peers.gguf_file MODEL_FOLDER FILE

Weights in bfloat16, norms and biases in float32. The words of the vocabulary mean nothing: the benchmark counts tokens,
and reads none.
"""

import importlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
"""transformers' name inside a layer -> llama.cpp's."""


def bfloat16_words(file: Path) -> Iterator[tuple[str, Any]]:
    """(name, uint16 array) of every tensor of a safetensors file in bfloat16."""
    numpy: Any = importlib.import_module("numpy")
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(size))
        for name, about in header.items():
            if name == "__metadata__":
                continue
            assert about["dtype"] == "BF16", f"{name} is {about['dtype']}"
            begin, end = about["data_offsets"]
            opened.seek(8 + size + begin)
            yield name, numpy.frombuffer(opened.read(end - begin), numpy.uint16).reshape(about["shape"])


def named(name: str) -> str:
    """llama.cpp's name of a tensor."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, inner = name.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}"


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Return the tokens and merges of a byte-level BPE: a merged pair, letters of all bytes, and numbered words."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))]
    words = (f"w{number}" for number in range(size))
    return [letters[0] + letters[1], *letters, *words][:size], [f"{letters[0]} {letters[1]}"]


def write(model: Path, file: Path) -> None:
    """Write the checkpoint in ``model`` as one GGUF file."""
    gguf: Any = importlib.import_module("gguf")
    numpy: Any = importlib.import_module("numpy")
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    tokens, merges = vocabulary(config["vocab_size"])
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, words in bfloat16_words(model / "model.safetensors"):
        if words.ndim == 1:
            writer.add_tensor(named(name), (words.astype(numpy.uint32) << 16).view(numpy.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(named(name), words.view(numpy.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
