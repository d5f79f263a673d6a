"""Correct which token stands for an image in LLaVA."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.vl.model.llava_hf:LlavaHfVisionModel.build_preprocessor",
    why="lets padding tokens stand for images, so a padding token in the text counts as a part of an image",
    for_models=("llava",),
    upstream="https://github.com/InternLM/lmdeploy/issues/3285",
)
def _image_token(original: Original, self: Any, trust_remote_code: bool = False) -> None:
    original(self, trust_remote_code)
    self.image_token_id = self.hf_config.image_token_index
