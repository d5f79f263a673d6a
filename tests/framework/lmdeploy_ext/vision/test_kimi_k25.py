"""Kimi-K2.5's vision part as one function of tensors, and the pixels of the tiny checkpoint's processor."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.models.kimi_k25_vision import MoonViT3dModel, PatchMergerMLP
from PIL import Image
from transformers import AutoProcessor

from dlinfer.framework.lmdeploy_ext.vision import moonvit, parts
from examples.kimi_k25_reference import patches_of
from examples.tiny_models.build import build
from examples.tiny_models.kimi_k25 import MEAN, MEDIA, MERGE, PATCH, STD

SIZES = {
    "merge_kernel_size": [2, 2],
    "patch_size": 4,
    "merge_type": "sd2_tpool",
    "vt_hidden_size": 32,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
    "vt_intermediate_size": 48,
    "init_pos_emb_height": 6,
    "init_pos_emb_width": 6,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "video_attn_type": "spatial_temporal",
    "text_hidden_size": 64,
    "mm_hidden_size": 32,
}


def made(dtype: torch.dtype = torch.float32) -> Any:
    """LMDeploy's vision part of random weights, as its model has it."""
    PytorchEngineConfig(device_type="cpu")
    torch.manual_seed(0)
    tower, projector = MoonViT3dModel(SIZES, dtype), PatchMergerMLP(SIZES, dtype)
    with torch.no_grad():
        for parameter in (*tower.parameters(), *projector.parameters()):
            parameter.normal_(std=0.3)
    return SimpleNamespace(vision_tower=tower, mm_projector=projector)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "grids", [[[1, 4, 4], [1, 4, 6]], [[1, 6, 6]], [[1, 2, 2], [1, 8, 2], [1, 2, 10]]], ids=str
)
@torch.inference_mode()
def test_features_are_lmdeploys(grids: list[list[int]], dtype: torch.dtype) -> None:
    model = made(dtype)
    shapes = torch.tensor(grids)
    pixels = torch.randn(int(shapes.prod(1).sum()), 3, 4, 4)
    expected = torch.cat(model.mm_projector(model.vision_tower(pixels.to(dtype), shapes)))
    given = moonvit.in_squares(model, {"pixel_values": pixels, "grid_thws": shapes})
    features = moonvit.features(model, **given)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(
        features, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )


def test_the_example_has_images_of_two_shapes() -> None:
    model = made()
    example = moonvit.example(model)
    assert example["grid_thws"].tolist() == [[1, 4, 4], [1, 4, 6]]
    assert example["pixel_values"].shape == (40, 3, 4, 4)
    own = parts.PARTS["KimiK25ForConditionalGeneration"]
    assert own.steady(moonvit.in_squares(model, example)) == []


def test_patches_of_a_square_follow_each_other() -> None:
    shapes = torch.tensor([[1, 2, 4], [1, 2, 2]])
    numbers = torch.arange(12.0)
    pixels = numbers[:, None, None, None].expand(-1, 3, 4, 4)
    given = moonvit.in_squares(made(), {"pixel_values": pixels, "grid_thws": shapes})
    assert given["pixel_values"][:, 0, 0, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10, 11]
    assert given["cu_seqlens"].tolist() == [8, 12]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """transformers' module of Kimi-K2.5's image processor, which imports torchvision to resize images."""
    functional = ModuleType("torchvision.transforms.v2.functional")
    v2 = ModuleType("torchvision.transforms.v2")
    v2.functional = functional  # pyright: ignore[reportAttributeAccessIssue]
    named = {"torchvision": ModuleType("torchvision"), "torchvision.transforms": ModuleType("transforms")}
    for name, module in (named | {v2.__name__: v2, functional.__name__: functional}).items():
        monkeypatch.setitem(sys.modules, name, module)
    file = Path(transformers.__file__).parent / "models" / "kimi_k25" / "image_processing_kimi_k25.py"
    spec = importlib.util.spec_from_file_location("transformers.models.kimi_k25._compared", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_pixels_of_images_that_keep_their_size_are_transformers(tmp_path: Path, native: ModuleType) -> None:
    build("kimi_k25", tmp_path / "model")
    processor = AutoProcessor.from_pretrained(tmp_path / "model", trust_remote_code=True).image_processor
    draw = np.random.default_rng(0)
    for width, height in ((72, 40), (40, 88), (32, 32), (56, 28), (1, 1)):
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        limits = (MEDIA["in_patch_limit"], MEDIA["patch_limit_on_one_side"])
        kept, padded = native.navit_resize(height, width, PATCH, MERGE, *limits)
        assert kept == (height, width)
        whole = torch.zeros(1, 3, *padded)
        whole[..., :height, :width] = torch.from_numpy(pixels).permute(2, 0, 1)
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        expected, *grid = native.Kimi_K25ImageProcessor.patchify(None, (whole / 255 - mean) / std, PATCH)
        image = Image.fromarray(pixels)
        made = processor.preprocess([{"type": "image", "image": image}], return_tensors="pt")
        patches, own = patches_of(image)
        assert made["grid_thws"].tolist() == [[1, *grid]] == [list(own)]
        torch.testing.assert_close(made["pixel_values"], expected[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(patches, made["pixel_values"], rtol=0, atol=0)
