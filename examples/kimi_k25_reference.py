"""Kimi-K2.5, whose checkpoints carry their processor as code: transformers' network, and pixels that are made here.

transformers' own processor needs torchvision. For images that need no resizing it does what this one does: zeros at
the right and below, to whole tokens; channels scaled; patches row by row; as many tokens in the text as an image has.
A job has the form that ``hf_vision_reference.py`` reads. Its images are small.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, unfold
from transformers import AutoTokenizer

from . import hf_vision_reference
from .tiny_models.kimi_k25 import MEAN, MERGE, PAD, PATCH, STD


class Processor:
    """Takes the arguments of transformers' processor, and returns the same tensors. tokenizer: of the checkpoint."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.apply_chat_template = tokenizer.apply_chat_template

    def __call__(self, text: list[str], images: list[Any] | None, return_tensors: str) -> dict[str, Tensor]:
        (prompt,) = text
        before, *behind = prompt.split(PAD)
        seen = [patches_of(image) for image in images or ()]
        for (_, (_, rows, columns)), further in zip(seen, behind, strict=True):
            before += PAD * (rows * columns // MERGE**2) + further
        inputs = dict(self.tokenizer(before, return_tensors=return_tensors))
        if seen:
            inputs["pixel_values"] = torch.cat([patches for patches, _ in seen])
            inputs["image_grid_thw"] = torch.tensor([grid for _, grid in seen])
        return inputs


def patches_of(image: Any) -> tuple[Tensor, tuple[int, int, int]]:
    """Return (patches [rows x columns, 3, side, side], (1, rows, columns)) of a picture that is not resized."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    unit = PATCH * MERGE
    below, right = (-size % unit for size in pixels.shape[1:])
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    scaled = (pad(pixels, (0, right, 0, below)).float() / 255 - mean) / std
    rows, columns = (size // PATCH for size in scaled.shape[1:])
    patches = unfold(scaled[None], PATCH, stride=PATCH)[0].T
    return patches.reshape(-1, 3, PATCH, PATCH), (1, rows, columns)


def run(folder: Path, job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Answer a job of ``hf_vision_reference.py``."""
    return hf_vision_reference.run(folder, job, Processor(AutoTokenizer.from_pretrained(folder)))
