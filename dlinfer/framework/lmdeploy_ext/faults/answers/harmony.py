"""Let GPT-OSS's tokenizer work if the package openai-harmony is not installed.

LMDeploy uses openai-harmony, which downloads a vocabulary, to separate the texts of the model's channels. Without that
package the token ids are the same, but the text of an answer holds the names and texts of all channels.
"""

import logging
from importlib import util
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original

logger = logging.getLogger("dlinfer")


@corrects(
    "lmdeploy.tokenizer:GptOssTokenizer.__init__",
    why="fails if openai-harmony is not installed, though token ids do not need it",
    essential=False,
)
def _init(original: Original, self: Any, model_dir: str, trust_remote_code: bool = False) -> None:
    if util.find_spec("openai_harmony") is not None:
        original(self, model_dir, trust_remote_code)
        return
    from lmdeploy.tokenizer import HuggingFaceTokenizer

    HuggingFaceTokenizer.__init__(self, model_dir, trust_remote_code)
    self.parser = None
    logger.warning(
        "the package openai-harmony is not installed, so answers of GPT-OSS contain the text of all its channels. Next "
        "step: pip install openai-harmony, or separate the channels yourself"
    )


@corrects(
    "lmdeploy.tokenizer:GptOssTokenizer.detokenize_incrementally",
    why="needs openai-harmony to separate the text of the model's channels",
    essential=False,
)
def _detokenize(
    original: Original,
    self: Any,
    all_input_ids: Any,
    state: Any,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Any:
    from lmdeploy.tokenizer import HuggingFaceTokenizer

    has_parser = getattr(self, "parser", None) is not None
    decode = original if has_parser else HuggingFaceTokenizer.detokenize_incrementally
    return decode(self, all_input_ids, state, skip_special_tokens, spaces_between_special_tokens)
