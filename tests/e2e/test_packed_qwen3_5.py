"""DLINFER_CPU_WEIGHTS=int4 of Qwen3.5: tokens equal those of transformers with the dequantised weights.

Packed are projections of attention, of linear attention, of MLPs and of experts. The vision part stays in floats.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.formats import AwqInt4
from examples.tiny_models.build import STAMP
from tests.e2e.cell_checks import FP32_DECISIVE
from tests.e2e.harness import Lab
from tests.e2e.vision_chats import CHATS, as_openai

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2000)]

FORM = AwqInt4(32)  # the largest common divisor of the tiny models' sizes
PROJECTION = re.compile(
    r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.(shared_expert\.)?(gate|up|down)_proj)\.weight"
)
ASKED = {"DLINFER_CPU_WEIGHTS": "int4", "DLINFER_CPU_HEAD": "kept", "DLINFER_FALLBACK": "error"}


def rounded(weight: Tensor) -> Tensor:
    return FORM.dequantise(FORM.quantise(weight)).contiguous()


def write_twin(floats: Path, out: Path) -> int:
    """Write the model with each packed weight as 4 bits have it. Returns how many tensors those were."""
    out.mkdir()
    for file in floats.iterdir():
        shutil.copy(file, out)
    tensors, count = load_file(floats / "model.safetensors"), 0
    for name, weight in tensors.items():
        if PROJECTION.fullmatch(name):
            tensors[name], count = rounded(weight), count + 1
        elif ".experts." in name:
            halves = [rounded(part) for expert in weight for part in expert.chunk(1 + ("gate" in name))]
            tensors[name], count = torch.cat(halves).view(weight.shape), count + 1
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / STAMP).write_text(
        f"{(out / STAMP).read_text()} in 4 bits\n"
    )  # the oracle's answers are kept by it
    return count


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("family", "packed"), [("qwen3_5", 3 * 3 + 4 + 4 * 3), ("qwen3_5_moe", 3 * 3 + 4 + 4 * 5)]
)
def test_tokens_equal_transformers(lab: Lab, tmp_path: Path, family: str, packed: int, mode: str) -> None:
    model = lab.model(family)
    twin = tmp_path / "twin"
    assert write_twin(model, twin) == packed
    hf = lab.reference(twin, chats=CHATS, max_new_tokens=24)
    assert min(float(hf[f"gap_{i}"].min()) for i in range(len(CHATS))) > FP32_DECISIVE, "choose another seed"
    asked = {"prompts": [as_openai(chat) for chat in CHATS], "chat": True}
    step = {"name": "s", "kind": "call", "gen": {"max_new_tokens": 24, "ignore_eos": True}, **asked}
    run = lab.engine(model, [step], environment=ASKED, dtype="float32", eager_mode=mode == "eager")
    assert run.tokens("s") == [hf[f"tokens_{i}"].tolist() for i in range(len(CHATS))]
    assert mode == "eager" or {outcome for _, outcome, _ in run["graphs"]["phases"]} <= {"compiled", "loaded"}
