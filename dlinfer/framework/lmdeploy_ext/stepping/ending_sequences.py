"""Sequences whose last token is being computed, as far as their length tells.

LMDeploy makes the next step ready while the one before it computes, and so decodes sequences once more that end with
that one. Of a batch a row is lost; where all of them end, a whole step, for which the next prompt waits, and beside
which it would be read in small portions.
"""

from collections.abc import Sequence
from typing import Any

_NAME = "dlinfer_in_flight"  # of the attribute in which a maker of inputs has the sequences of the step it made last


def note(maker: Any, made: dict[str, Any] | None) -> None:
    """Remember whom a step is of that was just made; ``made`` is ``_make_forward_inputs``'s."""
    setattr(maker, _NAME, () if made is None else tuple(made.get("running") or ()))


def decodes_on(maker: Any, is_ahead: bool) -> bool:
    """Whether a sequence of the running batch needs another step.

    is_ahead: whether the step that was made last is still computed, and will add a token to each of its sequences.
    """
    from lmdeploy.pytorch.messages import MessageStatus

    in_flight: Sequence[Any] = getattr(maker, _NAME, ()) if is_ahead else ()
    gain_one = set(map(id, in_flight))
    return any(
        seq.status == MessageStatus.RUNNING
        and seq.num_new_tokens + (id(seq) in gain_one) < seq.sampling_param.max_new_tokens
        for seq in maker.running_seqs
    )
