"""Let an answer stop after ``min_new_tokens=N`` tokens, not only after N + 1.

LMDeploy has two checks that forbid stop words in the first N tokens. The first check is right. The second check reads a
token count that is one too low, so it forbids stop words for one token more. We remove the second check.
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


def _padded(words: list[list[int]]) -> tuple[Tensor | None, Tensor | None]:
    """Return the lists of token ids as (int64 [B, N] padded with -1, mask [B, N] that is true for token ids).

    Both are None if all lists are empty.
    """
    width = max(map(len, words))
    if width == 0:
        return None, None
    tokens = torch.tensor([[*row, *[-1] * (width - len(row))] for row in words])
    return tokens, tokens >= 0


@corrects(
    "lmdeploy.pytorch.strategies.ar.sampling:ARSamplingStrategy.make_sampling_inputs",
    why="forbids stop words for min_new_tokens + 1 tokens",
)
def _make_sampling_inputs(original: Original, self: Any, seqs: list[Any]) -> Any:
    inputs = original(self, seqs)
    params = [seq.sampling_param for seq in seqs]
    if any(param.min_new_tokens > 0 and not param.ignore_eos for param in params):
        inputs.bad_words, inputs.bad_mask = _padded([param.bad_words for param in params])
    return inputs
