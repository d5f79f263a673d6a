"""Find sequences that reach their length limit with the token that is being computed.

LMDeploy prepares the next step while the current step computes, and so decodes an ending sequence once more. This
wastes a row of the batch, or a whole step if all sequences end. The next prompt then waits for this step, or is
prefilled beside it in small chunks.
"""

from collections.abc import Sequence
from typing import Any

_NAME = "dlinfer_in_flight"
"""Attribute of LMDeploy's inputs maker: the sequences of the latest step that it has prepared."""


def note(maker: Any, step: dict[str, Any] | None) -> None:
    """Store the sequences of the step that LMDeploy has just prepared. maker: LMDeploy's InputsMaker.

    step: the result of ``_make_forward_inputs``.
    """
    setattr(maker, _NAME, () if step is None else tuple(step.get("running") or ()))


def decodes_on(maker: Any, is_ahead: bool) -> bool:
    """Return whether a sequence of the running batch needs another decoding step.

    maker: LMDeploy's InputsMaker. is_ahead: whether the latest step still computes. That step will add a token to each
    of its sequences.
    """
    from lmdeploy.pytorch.messages import MessageStatus

    in_flight: Sequence[Any] = getattr(maker, _NAME, ()) if is_ahead else ()
    gain_one = set(map(id, in_flight))
    return any(
        seq.status == MessageStatus.RUNNING
        and seq.num_new_tokens + (id(seq) in gain_one) < seq.sampling_param.max_new_tokens
        for seq in maker.running_seqs
    )
