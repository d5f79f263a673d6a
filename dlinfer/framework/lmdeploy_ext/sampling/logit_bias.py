"""Apply logit_bias with an object that can be pickled, so that it can be sent to the engine's process."""

import math
from dataclasses import dataclass
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces


@dataclass(frozen=True)
class LogitBias:
    """A logits processor that adds ``biases`` to the logits of ``tokens``. LMDeploy's processor cannot be pickled."""

    tokens: tuple[int, ...]
    biases: tuple[float, ...]

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        """Add the biases to ``logits`` [vocabulary] in place, and return it. ``token_ids`` is not used."""
        logits[list(self.tokens)] += logits.new_tensor(self.biases)
        return logits

    def within(self, vocab_size: int) -> "LogitBias":
        """Return a LogitBias without tokens >= ``vocab_size``, as a tokenizer may have more tokens than the model."""
        kept = [pair for pair in zip(self.tokens, self.biases, strict=True) if pair[0] < vocab_size]
        return LogitBias(tuple(token for token, _ in kept), tuple(bias for _, bias in kept))


@replaces(
    "lmdeploy.serve.openai.chat_completions.logits_processors:logit_bias_logits_processor",
    why="returns a local function, which cannot be sent to the engine's process, so any logit_bias gets HTTP status "
    "500",
    when=activation.is_on,
    essential=False,
)
def processor(original: Original, logit_bias: dict[Any, float], tokenizer: Any) -> LogitBias:
    (biases,) = original(logit_bias, tokenizer).args  # checked token -> bias, cut to [-100, 100]
    for token, bias in logit_bias.items():
        if not math.isfinite(bias):
            raise ValueError(f"logit_bias of token {token} is {bias}, which is not a finite number")
    return LogitBias(tuple(biases), tuple(biases.values()))
