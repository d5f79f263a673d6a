"""Set the logits of forbidden tokens by an indexed write of these few logits.

LMDeploy calls torch's scatter instead. On a CPU, a scatter of 16-bit numbers goes through the whole vocabulary with all
threads. That takes a twentieth of a millisecond per step, and far longer if other processes keep the threads waiting.

LMDeploy also pads each row of forbidden tokens with token 0, up to the longest row of the batch. For the padding it
writes the old logit of token 0. So a request's forbidden token 0 may be drawn if another request of the batch forbids
more tokens.

This file is imported before LMDeploy's modules, since it patches them.
"""

from torch import Tensor

from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.pytorch.engine.logits_process:_process_bad_words_",
    why="restores the logit of a forbidden token 0 in padded rows, and scatters a few 16-bit logits with torch, "
    "which goes through the whole vocabulary on a CPU",
    signature="(scores, bad_words, mask, filter_value=-inf)",
)
def _bad_words(
    original: Original, scores: Tensor, bad_words: Tensor, mask: Tensor, filter_value: float = -float("inf")
) -> Tensor:
    if not scores.is_cpu:
        return original(scores, bad_words, mask, filter_value)
    row, column = mask.nonzero(as_tuple=True)
    scores.index_put_((row, bad_words[row, column]), scores.new_tensor(filter_value))
    return scores
