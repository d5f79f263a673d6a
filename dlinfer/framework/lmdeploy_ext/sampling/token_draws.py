"""Draw the next tokens with the device's own sampler, if its vendor provides one.

LMDeploy sorts the vocabulary for a draw, and on a CPU finds the largest logit on one thread. A vendor's sampler uses
the same random numbers (``multinomial.py``). It draws the same tokens, apart from rounding: LMDeploy rounds
probabilities and their sums to the logits' dtype.

This file is imported before LMDeploy's modules, since it patches them.
"""

from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces


def _by_sampler(inputs: Any, logits: Tensor) -> Tensor | None:
    """Return the tokens that the device's sampler draws from ``logits``, int64 [B]; None if LMDeploy has to draw."""
    if logits.device.type != activation.torch_device():
        return None
    sampler = activation.device().sampler()
    if sampler is None:
        return None
    if inputs.max_top_k == 1:
        return sampler.largest(logits)
    from dlinfer.framework.lmdeploy_ext.sampling.multinomial import philox_uniform

    numbers = philox_uniform(inputs.random_seeds, inputs.random_offsets).to(logits.device)
    return sampler.draw(logits, numbers, _top_k(inputs, logits), inputs.top_p, inputs.min_p)


def _top_k(inputs: Any, logits: Tensor) -> Tensor | None:
    """Return the top_k of each row, [B], with 0 for a row without a limit; None if no row has a limit."""
    if inputs.top_k is None and inputs.max_top_k > 0:
        return torch.full(logits.shape[:1], inputs.max_top_k, device=logits.device)
    return inputs.top_k


@replaces(
    "lmdeploy.pytorch.engine.logits_process:FusedLogitsProcessor.sampling",
    why="sorts the whole vocabulary for a draw, and finds the largest logit on one thread",
    when=activation.is_on,
    essential=False,
)
def _sampling(original: Original, self: Any, logits: Tensor) -> Tensor:
    with torch.inference_mode():
        tokens = _by_sampler(self.sampling_inputs, logits)
    return original(self, logits) if tokens is None else tokens
