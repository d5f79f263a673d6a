"""Make speculative decoding draw the tokens that the target model alone would draw for the same seed.

LMDeploy accepts a draft token by a random number without a seed, and draws another token after a rejection. Here we
draw a token for each position from the target's logits, with the request's seed, and accept a draft token if it equals
the drawn token. In both ways a draft token is accepted with the probability that the target gives it.

A step may add several tokens. LMDeploy counts them as one for ``min_new_tokens`` and for the seed's offset. Here each
of them counts.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.sampling.texts import Text
from dlinfer.framework.patching import Original

FEATURE = "speculative decoding"


def count(inputs: Any, rows: Sequence[tuple[int, Text, Sequence[int]]]) -> None:
    """Set ``num_ignore_eos`` and ``random_offsets`` of the rows that verify draft tokens.

    Both depend on the row's position in its sequence. inputs: the step's SamplingInputs. rows: from ``texts.of_rows``.
    """
    verified = [row for row in rows if row[1].rules.has_drafts]
    if not verified:
        return
    inputs.num_ignore_eos = inputs.num_ignore_eos.clone()
    inputs.random_offsets = inputs.random_offsets.clone()
    for row, text, drafted in verified:
        length = text.length + len(drafted)
        inputs.num_ignore_eos[row] = text.rules.min_new_tokens - length
        inputs.random_offsets[row] = text.prompt_length + length


@corrects(
    "lmdeploy.pytorch.spec_decode.reject_sampler:RejectionSampler.forward",
    why="accepts draft tokens by random numbers without a seed",
    for_feature=FEATURE,
)
def _forward(
    original: Original,
    self: Any,
    target_logits: Tensor,
    draft_token_ids: Tensor,
    expanded_sampling_inputs: Any,
    draft_probs: Tensor | None = None,
) -> Any:
    """Draw a token for each position, and accept draft tokens up to the first that differs from the drawn token.

    target_logits: [B, drafts + 1, V], after penalties and logits processors. draft_token_ids: [B, drafts].
    """
    if draft_probs is not None:
        return original(self, target_logits, draft_token_ids, expanded_sampling_inputs, draft_probs)
    from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor

    logits = target_logits.flatten(0, 1)
    drawn = FusedLogitsProcessor(expanded_sampling_inputs).sampling(logits)
    return self._impl.forward_greedy(drawn.view(target_logits.shape[:2]), draft_token_ids)
