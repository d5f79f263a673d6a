"""Write a tiny vision-language checkpoint: weights, tokenizer with the tokens of images, processor's configuration."""

import json
import shutil
from pathlib import Path
from typing import Any

from . import internvl_chat, tokenizer
from .families import STOP_IDS, VOCAB_SIZE
from .vision_families import VisionFamily

CHAT_TEMPLATE = (
    "{{% for m in messages %}}<|im_start|>{{{{ m['role'] }}}}\n"
    "{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}{{% for part in m['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)


def make(spec: VisionFamily) -> Any:
    """A model of random weights, whose biases and norms are torch's own."""
    import transformers

    model_class = getattr(transformers, f"{spec.hf_name}ForConditionalGeneration")
    model = model_class(model_class.config_class(**spec.config))
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):  # Gemma 3's is born as zeros
            parameter.data.normal_(std=0.2)
    return model


def forbid_image_tokens(model: Any) -> None:
    """No text may hold a token that stands for an image: their scores are 0, where the best of 1000 is far above."""
    import torch

    speaks = getattr(model, "thinker", model)
    with torch.no_grad():
        speaks.get_output_embeddings().weight[VOCAB_SIZE:] = 0


def save(spec: VisionFamily, model: Any, folder: Path) -> None:
    """Write model, tokenizer and processor to ``folder``."""
    model.generation_config.eos_token_id = STOP_IDS
    model.save_pretrained(folder)
    if spec.renamed is not None:
        _rename_weights(folder / "model.safetensors", *spec.renamed)
    if spec.joined:
        _join_experts(folder / "model.safetensors")
    tokens = tokenizer.train(spec.extra, CHAT_TEMPLATE.format(image=spec.image))
    tokens.save_pretrained(folder)
    for name, content in spec.files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def save_chat(spec: VisionFamily, model: Any, folder: Path, reference: Path) -> None:
    """Write InternVLChatModel's checkpoint to ``folder``, and transformers' own, its oracle, to ``reference``."""
    assert spec.chat is not None
    save(spec, model, reference)
    internvl_chat.save(model, folder, spec.chat)
    for file in reference.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(reference / "chat_template.jinja", folder)
    model.generation_config.save_pretrained(folder)


def _rename_weights(file: Path, now: str, then: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    if any(name.startswith(then) for name in weights):
        return
    renamed = {
        then + name.removeprefix(now) if name.startswith(now) else name: w for name, w in weights.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def _join_experts(file: Path) -> None:
    """Make tensors of all experts: gate and up [experts, 2 x inner, hidden], down [experts, hidden, inner]."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    first = [name for name in weights if ".experts.0.gate_proj." in name]
    for layer in (name.partition("0.gate_proj.")[0] for name in first):
        count = sum(name.startswith(layer) and ".gate_proj." in name for name in weights)
        gate, up, down = (
            torch.stack([weights.pop(f"{layer}{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        )
        weights |= {f"{layer}gate_up_proj": torch.cat([gate, up], 1), f"{layer}down_proj": down}
    save_file(weights, file, metadata={"format": "pt"})
