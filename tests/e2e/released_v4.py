"""A tiny DeepSeek-V4 as DeepSeek releases it, in FP8 and FP4, with its twin in floats, which is its oracle.

transformers writes the twin; its weights are rounded, and a copy of the folder gets the packed ones.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.tiny_models.build import REFERENCE, STAMP
from examples.tiny_models.build import build as build_floats
from tests.e2e.packed_model import save
from tests.framework.lmdeploy_ext.conversion import conversion_files

QUANTISED: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
RELEASED = {"embed_tokens": "embed", "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."}
"""Parts of names in transformers' checkpoints -> the same in DeepSeek's."""

_IN_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")


def blocked_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight [out, in] rounded to FP8 in blocks: (the numbers in float32, FP8, scales in E8M0)."""
    rows, columns = weight.shape
    numbers, scales = torch.empty_like(weight), []
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            here = slice(row, row + 128), slice(column, column + 128)
            scale = (weight[here].abs().max() / 448).log2().ceil().exp2()
            stored[here] = (weight[here] / scale).to(stored.dtype)
            numbers[here] = stored[here].float() * scale
            scales.append(scale)
    by_block = torch.stack(scales).view(-(-rows // 128), -1)
    return numbers, stored, by_block.to(torch.float8_e8m0fnu)


def build(folder: Path, experts: str, seed: int) -> None:
    """Make ``folder`` a released DeepSeek-V4, and ``REFERENCE`` in it its twin. experts: ``fp4`` or ``fp8``."""
    twin = folder / REFERENCE
    build_floats("deepseek_v4", twin, seed)
    floats = load_file(twin / "model.safetensors")
    released: dict[str, Tensor] = {}
    for name, weight in floats.items():
        own = name.removeprefix("model.")
        for part, other in RELEASED.items():
            own = own.replace(part, other)
        layer = own.removesuffix(".weight")
        if not layer.endswith(_IN_FP8) or "compressor" in layer:
            released[own] = weight
        elif ".ffn.experts." in layer and experts == "fp4":
            floats[name], blocks, scales = conversion_files.mxfp4(weight)
            released[own] = blocks.flatten(-2).view(torch.int8)
            released[f"{layer}.scale"] = scales.view(torch.float8_e8m0fnu)
        else:
            floats[name], released[own], released[f"{layer}.scale"] = blocked_fp8(weight)
    save_file(floats, twin / "model.safetensors", metadata={"format": "pt"})
    for file in twin.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    save(released, folder)
    config = json.loads((twin / "config.json").read_text())
    config |= {"quantization_config": QUANTISED, "expert_dtype": experts}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    sources = [Path(file).read_text() for file in (__file__, conversion_files.__file__)]
    made = hashlib.sha256("".join([*sources, (twin / STAMP).read_text()]).encode()).hexdigest()[:16]
    for place in (folder, twin):
        (place / STAMP).write_text(json.dumps({"fingerprint": f"released-{experts}-{seed}-{made}"}) + "\n")
