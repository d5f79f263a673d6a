"""GLM-4V (glm-4v-9b), whose checkpoints carry their network as code: transformers' ``Glm`` behind CogVLM2's encoder.

Jobs are those of ``hf_vision_reference.py``, with at most one image in a chat. The folder is the one of ``Glm``; the
checkpoint with the encoder's weights is the folder around it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from .cogvlm_reference import pixels_of
from .hf_reference import end_tokens
from .hf_vision_reference import with_images
from .tiny_models.cogvlm_network import Vision, share_position
from .tiny_models.glm4v import VISION, encoder


@torch.inference_mode()
def answer(
    model: Any, vision: Vision, side: int, tokenizer: Any, chat: list[dict[str, Any]], new: int
) -> dict[str, np.ndarray]:
    """Prompt, tokens, gaps and pixels of a chat of one message, whose image stands before its text."""
    (message,), pictures = with_images(chat)
    content = message["content"]
    parts = [content] if isinstance(content, str) else [one["text"] for one in content if "text" in one]
    text = "\n".join(["<IMAGE>"] * len(pictures) + parts)
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in prompt.split("<IMAGE>")]
    ids, pixels, features = pieces[0], None, None
    begin = len(ids)
    if pictures:
        pixels = pixels_of(pictures[0], side)
        (features,) = vision(pixels[None])
        ids = ids + [0] * len(features) + pieces[1]
    ends = end_tokens(model, tokenizer)
    made, gaps = [], []
    for _ in range(new):
        every = torch.tensor(ids + made)
        embeds, positions = model.get_input_embeddings()(every), torch.arange(len(every))
        if features is not None:
            embeds[begin : begin + len(features)] = features
            share_position(positions, begin, begin + len(features))
        # Without a mask transformers takes a position that comes again for the beginning of another text.
        mask = torch.ones(1, len(every), dtype=torch.int64)
        out = model(
            inputs_embeds=embeds[None], position_ids=positions[None], attention_mask=mask, use_cache=False
        )
        scores = out.logits[0, -1].float()
        scores[ends] = -torch.inf
        best = scores.topk(2)
        made.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    found = {"prompt": np.asarray(ids), "tokens": np.asarray(made), "gap": np.asarray(gaps, np.float32)}
    return found if pixels is None else found | {"pixels": pixels.numpy()}


def run(folder: Path, job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Answer a job of ``hf_vision_reference.py``."""
    around = folder.parent
    config = json.loads((around / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vision = encoder(config).eval()
    weights = load_file(around / "model.safetensors")
    vision.load_state_dict(
        {name.removeprefix(VISION): w.float() for name, w in weights.items() if name.startswith(VISION)}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arrays = {"dtype": np.array("float32")}
    side = config["vision_config"]["image_size"]
    for i, chat in enumerate(job["chats"]):
        found = answer(model, vision, side, tokenizer, chat, job["max_new_tokens"])
        arrays |= {f"{name}_{i}": values for name, values in found.items()}
    return arrays
