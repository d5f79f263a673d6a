"""Correct LLaVA and LLaVA-NeXT: their prompts, which token stands for an image, and how many tokens an image has."""

from types import SimpleNamespace
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.models import image_prompts
from dlinfer.framework.patching import Original

_BOTH = ("llava", "llava_next")
_NEXT = "lmdeploy.vl.model.llava_next:LlavaNextVisionModel"


@corrects(
    "lmdeploy.vl.model.llava_hf:LlavaHfVisionModel.build_preprocessor",
    why="lets padding tokens stand for images, so a padding token in the text counts as a part of an image",
    for_models=_BOTH,
    upstream="https://github.com/InternLM/lmdeploy/issues/3285",
)
def _image_token(original: Original, self: Any, trust_remote_code: bool = False) -> None:
    original(self, trust_remote_code)
    self.image_token_id = self.hf_config.image_token_index


def _marks(model: Any, tokenizer: Any) -> dict[str, Any]:
    token = tokenizer.model.model.convert_ids_to_tokens(model.image_token_id)
    return {"place": token, "token": token, "written": lambda image: token * image["image_tokens"]}


PATCHES = (
    image_prompts.corrected(
        "lmdeploy.vl.model.llava_hf:LlavaHfVisionModel.to_pytorch", _marks, for_models=_BOTH
    ),
)


@corrects(
    f"{_NEXT}.build_preprocessor",
    why="builds the whole model of transformers to count tokens, by names that transformers 5 changed",
    for_models=("llava_next",),
)
def _no_model(original: Original, self: Any, trust_remote_code: bool = False) -> None:
    from lmdeploy.vl.model.llava_hf import LlavaHfVisionModel

    LlavaHfVisionModel.build_preprocessor(self, trust_remote_code)


@corrects(
    f"{_NEXT}.preprocess",
    why="counts the tokens of an image by a model that it cannot build with transformers 5",
    for_models=("llava_next",),
)
def _preprocess(original: Original, self: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from lmdeploy.pytorch.models.llava import LlavaNextForConditionalGeneration as Model

    model: Any = SimpleNamespace(config=self.hf_config)
    strategy = self.hf_config.vision_feature_select_strategy
    outputs = []
    for _, image, _ in self.collect_multimodal_items(messages):
        pixels = self.processor(image, return_tensors="pt", input_data_format="channels_last")
        tiles = pixels["pixel_values"].shape[1]
        packed = Model.pack_image_features(
            model,
            [torch.zeros(tiles, self.n_token_per_image, 1)],
            pixels["image_sizes"],
            strategy,
            torch.zeros(1),
        )
        fields = {"image_tokens": len(packed), "image_token_id": self.image_token_id}
        outputs.append(
            {"pixel_values": pixels["pixel_values"], "image_sizes": pixels["image_sizes"], **fields}
        )
    messages.append({"role": "preprocess", "content": outputs})
    return messages
