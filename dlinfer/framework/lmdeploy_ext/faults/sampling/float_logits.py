"""Make the engine read the logits that it stored for ``output_logits="all"`` in the model's dtype.

LMDeploy stores them as int16 words, and reads only 16-bit dtypes correctly: it fails for a model in float32.
"""

from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.pytorch.messages:HistoryLogits.get_logits",
    why="reads float32 logits as 16-bit logits, and the error ends the engine's loop",
)
def _get_logits(original: Original, self: Any) -> torch.Tensor | None:
    if self._data is None or self._torch_dtype is None:
        return original(self)
    words = self.get_real()  # int16 [tokens, vocabulary * words in a number]
    return torch.frombuffer(words, dtype=self._torch_dtype).view(words.shape[0], -1)
