"""A Kimi-K2.5 checkpoint as it is published: configuration and processor are code, and weights have the names of both.

transformers 5 loads the same weights under another configuration, which is the oracle's. The code that is written here
has the interface of the published one: ``medias`` go in, one token stands for an image in the text, ``pixel_values``
[patches, 3, 14, 14] and ``grid_thws`` [images, 3] come out.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

PATCH, MERGE = 14, 2
"""LMDeploy serves these alone."""

PAD = "<|media_pad|>"
IMAGE = f"<|media_begin|>image<|media_content|>{PAD}<|media_end|>"
TOKENS = ["<|media_begin|>", "<|media_content|>", "<|media_end|>", PAD, "<|kimi_k25_video_placeholder|>"]
"""The tokens of images, in the order of their ids."""

MEAN = STD = (0.5, 0.5, 0.5)

MEDIA = {
    "in_patch_limit": 16384,
    "patch_size": PATCH,
    "image_mean": list(MEAN),
    "image_std": list(STD),
    "merge_kernel_size": MERGE,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "temporal_merge_kernel_size": 4,
}

CONFIGURATION = '''"""Configuration of a tiny Kimi-K2.5."""

from transformers import DeepseekV3Config, PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    def __init__(self, **fields):
        super().__init__(**fields)


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"

    def __init__(self, text_config=None, vision_config=None, media_placeholder_token_id=163605, **fields):
        if isinstance(text_config, dict):
            text_config = DeepseekV3Config(**text_config)
        if isinstance(vision_config, dict):
            vision_config = KimiK25VisionConfig(**vision_config)
        self.text_config = text_config
        self.vision_config = vision_config
        self.media_placeholder_token_id = media_placeholder_token_id
        if getattr(text_config, "quantization_config", None) is not None:
            self.quantization_config = text_config.quantization_config
        super().__init__(**fields)
'''

IMAGE_PROCESSOR = '''"""Image processor of a tiny Kimi-K2.5."""

import numpy as np
import torch
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature


class KimiK25VisionProcessor(BaseImageProcessor):
    model_type = "kimi_k25"

    def __init__(self, media_proc_cfg, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg

    def preprocess(self, medias, return_tensors=None):
        pixels, grids = zip(*(self._patches(media["image"]) for media in medias))
        data = {"pixel_values": torch.cat(pixels), "grid_thws": torch.tensor(grids)}
        return BatchFeature(data=data, tensor_type=return_tensors)

    def _patches(self, image):
        """(patches [number, 3, side, side] in rows, their grid). An image keeps its size: tests have small ones."""
        own = self.media_proc_cfg
        side = own["patch_size"]
        unit = side * own["merge_kernel_size"]
        image = np.asarray(image.convert("RGB"))
        height, width = image.shape[:2]
        assert (height // side) * (width // side) <= own["in_patch_limit"], "tests have small images"
        image = np.pad(image, ((0, -height % unit), (0, -width % unit), (0, 0)))
        mean, std = (np.array(own[name], dtype=np.float32) for name in ("image_mean", "image_std"))
        scaled = ((image / np.float32(255)).astype(np.float32) - mean) / std
        rows, columns = image.shape[0] // side, image.shape[1] // side
        patches = scaled.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
        return torch.from_numpy(patches.reshape(-1, 3, side, side).copy()), (1, rows, columns)
'''

PROCESSOR = '''"""Processor of a tiny Kimi-K2.5."""

from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin


class KimiK25Processor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    valid_kwargs = ["chat_template"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.media_processor = image_processor

    def __call__(self, messages=None, medias=None, text=None, return_tensors="pt", **kwargs):
        if medias is None or text is None:
            raise ValueError("Provide both 'medias' and 'text'")
        seen = self.media_processor.preprocess(medias, return_tensors=return_tensors)
        read = self.tokenizer(text, return_tensors=return_tensors)
        return BatchFeature(data={**read, **seen.data})
'''

_VISION = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "num_hidden_layers": "vt_num_hidden_layers",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "pos_emb_time": "init_pos_emb_time",
    "patch_size": "patch_size",
    "merge_kernel_size": "merge_kernel_size",
}


# Beginnings of names as transformers 5.23 saves them -> as they are published, which it loads.
_NAMES = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    "model.mm_projector.": "mm_projector.",
}


def save(folder: Path, reference: Path) -> None:
    """Write to ``folder`` as it would be published what transformers has saved in ``reference``.

    The weights in ``reference`` get the published names too.
    """
    file = reference / "model.safetensors"
    weights = {_published_name(name): weight for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    for file in reference.iterdir():
        shutil.copy(file, folder)
    native = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_published(native), indent=2) + "\n")
    files = {
        "configuration_kimi_k25.py": CONFIGURATION,
        "kimi_k25_processor.py": PROCESSOR,
        "kimi_k25_vision_processing.py": IMAGE_PROCESSOR,
    }
    for name, code in files.items():
        (folder / name).write_text(code)
    preprocessor = {
        "auto_map": {
            "AutoProcessor": "kimi_k25_processor.KimiK25Processor",
            "AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor",
        },
        "media_proc_cfg": MEDIA,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n")


def _published_name(name: str) -> str:
    for saved, published in _NAMES.items():
        if name.startswith(saved):
            return published + name.removeprefix(saved)
    return name


def _published(native: dict[str, Any]) -> dict[str, Any]:
    """The fields of a published config.json. native: those that transformers 5 saves."""
    text, vision = native["text_config"], native["vision_config"]
    rope = text.pop("rope_parameters")
    text |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
    }
    modeling = "modeling_kimi_k25.KimiK25ForConditionalGeneration"
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": modeling,
            "AutoModelForCausalLM": modeling,
        },
        "model_type": "kimi_k25",
        "dtype": native["dtype"],
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "media_placeholder_token_id": native["image_token_id"],
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": TOKENS[-1],
        "text_config": text,
        "vision_config": {published: vision[name] for name, published in _VISION.items()}
        | {
            "merge_type": "sd2_tpool",
            "mm_hidden_size": vision["hidden_size"],
            "mm_projector_type": "patchmerger",
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": native["projection_layer_norm_eps"],
            "text_hidden_size": text["hidden_size"],
            "video_attn_type": "spatial_temporal",
        },
    }
