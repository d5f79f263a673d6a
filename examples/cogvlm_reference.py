"""CogVLM and CogVLM2, whose checkpoints carry their network as code and have no class in transformers.

Jobs are those of ``hf_vision_reference.py``, with at most one image in a chat.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .hf_vision_reference import with_images
from .tiny_models.cogvlm_network import Network

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def pixels_of(picture: Image.Image, side: int) -> Tensor:
    """A picture resized to a square, and normalised: float32 [3, side, side]."""
    if picture.size != (side, side):
        picture = picture.resize((side, side), Image.Resampling.BICUBIC)
    x = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@torch.inference_mode()
def answer(
    network: Network, tokenizer: Any, chat: list[dict[str, Any]], new: int, ends: list[int]
) -> dict[str, np.ndarray]:
    """Prompt, tokens, gaps and pixels of a chat of one message.

    Text alone is asked by the tokenizer's template where the checkpoint has one, as CogVLM2's have.
    """
    (message,), pictures = with_images(chat)
    content = message["content"]
    parts = [content] if isinstance(content, str) else [one["text"] for one in content if "text" in one]
    text, image, features, ids = "\n".join(parts), None, None, [tokenizer.bos_token_id]
    prompt = f"Question: {text} Answer:"
    if pictures:
        vision = network.config["vision_config"]
        image = pixels_of(pictures[0], vision["image_size"])
        (features,) = network.model.vision(image[None].to(network.lm_head.weight))
        ids += [0] * len(features)
    elif "num_multi_query_heads" in network.config:
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids += tokenizer.encode(prompt, add_special_tokens=False)
    made, gaps = [], []
    for _ in range(new):
        scores = network(torch.tensor(ids + made), features, begin=1).float()
        scores[ends] = -torch.inf
        best = scores.topk(2)
        made.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    found = {
        "prompt": np.asarray(ids),
        "tokens": np.asarray(made),
        "gap": np.asarray(gaps, dtype=np.float32),
    }
    if image is not None:
        found["pixels"] = image.numpy()
    return found


def run(folder: Path, job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Answer a job of ``hf_vision_reference.py``."""
    config = json.loads((folder / "config.json").read_text())
    network = Network(config).eval()
    network.load_state_dict(
        {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    )
    dtype = job.get("dtype", "auto")
    network = network.to(getattr(torch, config["dtype"] if dtype == "auto" else dtype))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    arrays = {"dtype": np.array(str(network.lm_head.weight.dtype).removeprefix("torch."))}
    for i, chat in enumerate(job["chats"]):
        found = answer(network, tokenizer, chat, job["max_new_tokens"], ends)
        arrays |= {f"{name}_{i}": values for name, values in found.items()}
    return arrays
