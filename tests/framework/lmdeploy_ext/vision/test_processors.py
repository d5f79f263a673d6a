"""Images without torchvision, media that are refused, and the parts that graph mode takes a model into."""

import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.configurations.glm4_1v import Glm4vModelConfigBuilder
from lmdeploy.pytorch.models.glm4_1v import Glm4vVisionEmbeddings
from lmdeploy.vl.model.builder import load_vl_model
from PIL import Image
from transformers import AutoProcessor, Glm4vConfig, Glm4vVisionConfig
from transformers.models.auto.video_processing_auto import AutoVideoProcessor

from dlinfer.errors import ModelFolderError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.request.media import check_messages
from dlinfer.framework.lmdeploy_ext.vision import parts, processors, towers
from dlinfer.framework.lmdeploy_ext.vision.transforms import with_transforms
from examples.tiny_models.build import build

without_torchvision = pytest.mark.skipif(
    processors.has_torchvision(), reason="transformers' own video processors are there"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "qwen2_vl"
    build("qwen2_vl", out)
    return out


@without_torchvision
def test_a_processor_is_loaded_without_its_part_for_videos(folder: Path):
    with pytest.raises(ImportError):
        AutoProcessor.from_pretrained(folder)
    with processors.without_videos():
        processor = AutoProcessor.from_pretrained(folder)
    assert type(processor.image_processor).__name__ == "Qwen2VLImageProcessorPil"
    with pytest.raises(UnsupportedFeatureError, match="video"):
        processor.video_processor(videos=[torch.zeros(2, 3, 8, 8)])
    with pytest.raises(ImportError):
        AutoProcessor.from_pretrained(folder)


@without_torchvision
def test_other_threads_see_transformers_as_it_is(folder: Path):
    found = []

    def elsewhere():
        try:
            AutoVideoProcessor.from_pretrained(folder)
        except ImportError as error:
            found.append(error)

    with processors.without_videos():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(found) == 1


def test_a_folder_without_image_processor_is_refused_in_our_words(folder: Path, tmp_path: Path):
    config = PytorchEngineConfig(device_type="cpu")
    assert load_vl_model(str(folder), "pytorch", backend_config=config).image_token_id == 1002
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(
        ModelFolderError, match=r"image processor.*Next step: check that it has preprocessor_config"
    ):
        load_vl_model(str(bare), "pytorch", backend_config=config)


def test_only_a_function_that_is_given_them_sees_the_transforms():
    def compose():
        import torchvision.transforms as T  # pyright: ignore[reportMissingImports]
        from torchvision.transforms.functional import (  # pyright: ignore[reportMissingImports]
            InterpolationMode,
        )

        mode = InterpolationMode.BICUBIC
        steps = [T.Lambda(lambda x: x.convert("RGB")), T.Resize((4, 6), interpolation=mode), T.ToTensor()]
        return T.Compose([*steps, T.Normalize(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))])

    pixels = np.random.default_rng(0).integers(0, 256, (9, 5), dtype=np.uint8)
    image = Image.fromarray(pixels)
    got = with_transforms(compose)()(image)
    resized = np.asarray(image.convert("RGB").resize((6, 4), Image.Resampling.BICUBIC), dtype=np.float64)
    expected = (resized / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.3, 0.4]
    assert got.dtype == torch.float32
    np.testing.assert_allclose(
        got, expected.transpose(2, 0, 1), atol=1e-6
    )  # two roundings of numbers below 4
    assert "torchvision" not in sys.modules
    if not processors.has_torchvision():
        with pytest.raises(ImportError):
            compose()


def test_videos_sounds_and_time_series_are_refused_by_name():
    text = {"type": "text", "text": "hello"}
    check_messages([{"role": "user", "content": "hello"}, {"role": "user"}])
    check_messages(
        [{"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": "data:"}}]}]
    )
    for kind, named in (
        ("video_url", "video"),
        ("video", "video"),
        ("audio", "audio"),
        ("time_series", "time series"),
    ):
        with pytest.raises(UnsupportedFeatureError, match=f"^{named} input is not supported"):
            check_messages([{"role": "user", "content": [text, {"type": kind}]}])


def test_the_language_fields_of_glm4v_stand_where_lmdeploys_model_looks_for_them():
    PytorchEngineConfig(device_type="cpu")
    rope = {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.5}
    text = {"hidden_size": 64, "num_attention_heads": 4, "rms_norm_eps": 0.25, "rope_parameters": rope}
    config = Glm4vConfig(text_config=dict(text))
    made = Glm4vModelConfigBuilder.build(config)
    assert (made.hidden_size, made.head_dim, made.use_mrope, made.eos_token_id) == (64, 16, True, None)
    assert made.hf_config is config
    assert {name: getattr(config, name) for name in text} == text | {
        "rope_parameters": rope | {"mrope_section": [8, 12, 12]}
    }
    assert (config.head_dim, config.attention_bias) == (16, True)


def test_a_glm4v_that_rotates_another_part_of_each_head_is_refused():
    PytorchEngineConfig(device_type="cpu")
    rope = {"rope_type": "default", "rope_theta": 10.0}
    config = Glm4vConfig(text_config={"rope_parameters": rope})
    with pytest.raises(UnsupportedFeatureError, match=r"GLM-4.1V with partial_rotary_factor=1.0"):
        Glm4vModelConfigBuilder.build(config)


def test_sizes_are_marked_in_every_tensor_of_an_argument():
    tables = (torch.zeros(3, 4), torch.zeros(3, 4))
    sizes: parts.Sizes = {"rotary_pos_emb": ("patches", None), "absent": ("images",)}
    marks = list(parts.marks(sizes, {"rotary_pos_emb": tables, "absent": None}))
    assert [(dim, counted) for _, dim, counted in marks] == [(0, "patches"), (1, None)] * 2
    assert [tensor is table for (tensor, _, _), table in zip(marks[::2], tables, strict=True)] == [True, True]


def test_a_model_without_images_has_no_parts():
    assert parts.of_model(torch.nn.Linear(2, 2)) is None


def test_positions_of_glm4v_are_resampled_for_each_image_before_its_graph():
    """The table is 2 x 2: an image of 2 x 2 patches takes it as it is, in the order of its patches."""
    config = Glm4vVisionConfig(hidden_size=3, image_size=4, patch_size=2)
    embeddings = Glm4vVisionEmbeddings(config)
    model = SimpleNamespace(visual=SimpleNamespace(embeddings=embeddings))
    own = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    wide = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]])
    given = {
        "cu_seqlens": torch.tensor([4, 12], dtype=torch.int32),
        "grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]]),
        "image_type_ids": torch.cat([own, wide]),
    }
    made = towers.with_positions(model, dict(given))
    assert sorted(made) == ["cu_seqlens", "pos_embeds"]
    table = embeddings.position_embedding.weight
    torch.testing.assert_close(made["pos_embeds"][:4], table)
    alone = towers.with_positions(
        model,
        {
            "cu_seqlens": torch.tensor([8], dtype=torch.int32),
            "grid_thw": given["grid_thw"][1:],
            "image_type_ids": wide,
        },
    )
    torch.testing.assert_close(made["pos_embeds"][4:], alone["pos_embeds"], rtol=0, atol=0)
    assert not torch.equal(alone["pos_embeds"][:4], table)


def test_features_stand_where_images_do_and_zeros_elsewhere():
    class Visual:
        deepstack_visual_indexes = (0, 1)

    class Model:
        visual = Visual()

    class Metadata:
        is_decoding = False

    embeds = torch.ones(1, 4, 2)
    mask = torch.tensor([False, True, True, False])[None, :, None].expand(1, 4, 2)
    features = [torch.full((2, 2), 2.0), torch.full((2, 2), 3.0)]
    given = {"inputs_embeds": embeds, "attn_metadata": Metadata(), "input_ids": None}
    made = towers.dense_features(
        Model(), dict(given, visual_pos_masks=mask, deepstack_visual_embeds=features)
    )
    assert sorted(made) == ["attn_metadata", "deepstack", "inputs_embeds"]
    expected = torch.zeros(2, 1, 4, 2)
    expected[0, 0, 1:3], expected[1, 0, 1:3] = 2, 3
    torch.testing.assert_close(made["deepstack"], expected)
    none = towers.dense_features(Model(), dict(given, visual_pos_masks=None, deepstack_visual_embeds=None))
    torch.testing.assert_close(none["deepstack"], torch.zeros(2, 1, 4, 2))
    Metadata.is_decoding = True
    assert "deepstack" not in towers.dense_features(Model(), dict(given))
