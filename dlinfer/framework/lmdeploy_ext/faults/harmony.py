"""GPT-OSS's tokenizer where the package openai-harmony is not installed.

LMDeploy takes the texts of its channels apart with that package, which also fetches a vocabulary from the network.
Without it tokens are the same, and the text is what the model writes, with the names of the channels in it.
"""

import functools
import logging
from collections.abc import Callable
from importlib import util
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Patch

logger = logging.getLogger("dlinfer")


def _plain() -> Any:
    from lmdeploy.tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, model_dir: str, trust_remote_code: bool = False) -> None:
        if activation.active() is None or util.find_spec("openai_harmony") is not None:
            original(self, model_dir, trust_remote_code)
            return
        _plain().__init__(self, model_dir, trust_remote_code)
        self.parser = None
        logger.warning(
            "GPT-OSS without the package openai-harmony: texts hold what the model writes in all its channels. Next "
            "step: pip install openai-harmony, or read the channels in the text"
        )

    return __init__


def _detokenize(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def detokenize_incrementally(
        self: Any,
        all_input_ids: Any,
        state: Any,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Any:
        plain = getattr(self, "parser", None) is None
        decode = _plain().detokenize_incrementally if plain else original
        return decode(self, all_input_ids, state, skip_special_tokens, spaces_between_special_tokens)

    return detokenize_incrementally


PATCHES = (
    Patch(
        target="lmdeploy.tokenizer:GptOssTokenizer.__init__",
        why="fails where openai-harmony is not installed, which tokens do not need",
        signature="(self, model_dir, trust_remote_code=False)",
        build=_init,
        essential=False,
    ),
    Patch(
        target="lmdeploy.tokenizer:GptOssTokenizer.detokenize_incrementally",
        why="reads channels with openai-harmony; without it the text is taken whole",
        signature="(self, all_input_ids, state, skip_special_tokens=True, spaces_between_special_tokens=True)",
        build=_detokenize,
        essential=False,
    ),
)
