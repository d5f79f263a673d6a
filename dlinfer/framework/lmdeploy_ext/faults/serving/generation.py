"""Correct two kinds of arguments of ``pipe(prompts, ...)``: an older keyword, and lists of the wrong length.

LMDeploy 0.18 silently ignores ``request_output_len=256``. Here it becomes ``max_new_tokens``, with a log message. For a
list with another length than the list of prompts, LMDeploy's caller waits forever. Here the caller gets the error.
"""

import copy
import logging
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original

logger = logging.getLogger("dlinfer")


@corrects(
    "lmdeploy.pipeline:Pipeline._request_generator",
    why="silently drops request_output_len, a documented limit, and raises in another thread if a list is not as "
    "long as the prompts' list, so the caller waits forever",
    essential=False,
)
def _request_generator(
    original: Original, self: Any, prompts: Any, sessions: Any = None, gen_config: Any = None, **kwargs: Any
) -> Any:
    if "request_output_len" in kwargs:
        length = kwargs.pop("request_output_len")
        logger.info("request_output_len=%s is used as GenerationConfig(max_new_tokens=%s)", length, length)
        gen_config = _with_max_new_tokens(gen_config, length)
    # The list makes errors rise here. A generator would raise them in the engine's thread.
    return iter(list(original(self, prompts, sessions=sessions, gen_config=gen_config, **kwargs)))


def _with_max_new_tokens(gen_config: Any, length: int) -> Any:
    from lmdeploy.messages import GenerationConfig

    if gen_config is None:
        return GenerationConfig(max_new_tokens=length)
    if isinstance(gen_config, list):
        return [_with_max_new_tokens(each, length) for each in gen_config]
    changed = copy.deepcopy(gen_config)
    changed.max_new_tokens = length
    return changed
