"""Write only the few logits of forbidden tokens.

LMDeploy scatters these logits. torch's scatter of 16-bit numbers on a CPU goes through the whole vocabulary with all
threads: a twentieth of a millisecond per step, and far longer if other processes keep the threads waiting. LMDeploy
also writes the old logit of token 0 wherever it pads a row. So a forbidden token 0 may be drawn if another request of
the batch forbids more tokens.

This file loads before LMDeploy's modules do, since it patches them.
"""

from torch import Tensor

from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.pytorch.engine.logits_process:_process_bad_words_",
    why="puts back the logit of a forbidden token 0 where a row is padded; scatters a few 16-bit logits by torch, "
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
