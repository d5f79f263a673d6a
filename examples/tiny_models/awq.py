"""An AWQ checkpoint made from a model in floats, whose twin with the rounded weights is then its oracle.

AWQ's scaling of activations is left out: it changes which numbers are rounded, not how they are stored. Stored is what
AutoAWQ calls version "gemm" (Lin et al., 2023, arXiv:2306.00978): of each linear layer of the decoder
``qweight`` int32 [in, out / 8], ``scales`` float16 [in / group, out] and ``qzeros`` int32 [in / group, out / 8]; a word
holds eight neighbours along out.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GROUP_SIZE = 32
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word each of eight neighbours takes."""


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """int32 [rows, columns / 8] of numbers [rows, columns] from 0 to 15."""
    columns = numbers.to(torch.int64)
    words = sum(columns[:, which::8] * 16**place for which, place in enumerate(PLACES))
    assert isinstance(words, torch.Tensor)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32).contiguous()


def rounded(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A weight [out, in] rounded to 4 bits: as float32 [out, in], and as a checkpoint has it."""
    out_features, in_features = weight.shape
    groups = weight.double().reshape(out_features, in_features // group_size, group_size)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    step = scales.double().clamp(min=1e-8)
    zeros = (-low / step).round().clamp(0, 15)
    numbers = (groups / step[..., None] + zeros[..., None]).round().clamp(0, 15)
    again = (numbers - zeros[..., None]) * scales.double()[..., None]
    parts = {
        "qweight": packed(numbers.reshape(out_features, in_features).t()),
        "scales": scales.t().contiguous(),
        "qzeros": packed(zeros.t()),
    }
    return again.reshape(out_features, in_features).float(), parts


def save(model: Any, folder: Path, twin: Path, group_size: int = GROUP_SIZE) -> None:
    """Write the AWQ checkpoint of a float32 model into ``folder``, and what it stands for, in float32, into ``twin``.

    model: its weights are changed.
    """
    with torch.no_grad():
        for parameter in model.parameters():  # all others are stored in float16
            parameter.copy_(parameter.half().float())
    tensors = {}
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight, parts = rounded(module.weight.data, group_size)
            module.weight.data = weight
            tensors |= {f"model.{name}.{part}": tensor for part, tensor in parts.items()}
    model.save_pretrained(twin)
    packed_names = {name.rpartition(".")[0] + ".weight" for name in tensors}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name not in packed_names | tied:
            tensors[name] = tensor.half().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantisation = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    config = model.config.to_dict() | {"dtype": "float16", "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model.generation_config.save_pretrained(folder)
