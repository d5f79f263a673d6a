"""``min_new_tokens=N`` lets a text stop after N tokens, not after N + 1.

LMDeploy forbids stop words twice until then. One count is right; the other adds them to the forbidden words while the
sequence has fewer than N tokens, when it is one token behind.
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


def _padded(words: list[list[int]]) -> tuple[Tensor | None, Tensor | None]:
    """Tokens, int64 [B, N], and which places hold one, bool [B, N]; None where no row has any."""
    width = max(map(len, words))
    if width == 0:
        return None, None
    tokens = torch.tensor([[*row, *[-1] * (width - len(row))] for row in words])
    return tokens, tokens >= 0


@corrects(
    "lmdeploy.pytorch.strategies.ar.sampling:ARSamplingStrategy.make_sampling_inputs",
    why="forbids stop words for one token more than min_new_tokens",
)
def _make_sampling_inputs(original: Original, self: Any, seqs: list[Any]) -> Any:
    inputs = original(self, seqs)
    params = [seq.sampling_param for seq in seqs]
    if any(param.min_new_tokens > 0 and not param.ignore_eos for param in params):
        inputs.bad_words, inputs.bad_mask = _padded([param.bad_words for param in params])
    return inputs
