"""Decide whether a sequence ends."""

from typing import Any

from dlinfer.framework.mindie_ext.batch.context import SequenceState
from dlinfer.framework.mindie_ext.batch.generation_output import FinishReason

_WINDOW = 8
"""The last tokens are searched for a stop string: as many as the string has characters, and this many more.

The additional tokens are needed because one character may consist of several tokens.
"""


def why_finished(
    state: SequenceState, eos_token_ids: frozenset[int], max_seq_len: int, tokenizer: Any
) -> tuple[FinishReason, int]:
    """Return (reason, characters) for the last token of a sequence.

    reason: why the sequence ends with this token; CONTINUE if the sequence goes on. characters: how many characters to
    cut from the end of its text, because of a stop string.

    The checks have MindIE's order: end-of-sequence token, stop tokens, stop strings, limits.
    """
    last = state.tokens[-1]
    if not state.ignore_eos and last in eos_token_ids:
        return FinishReason.EOS, 0
    for stop in state.stop_token_ids:
        run = stop if isinstance(stop, list) else [stop]
        if run and state.new_tokens[-len(run) :] == run:
            return FinishReason.STOP_TOKEN_IDS, 0
    for stop in state.stop_strings:
        tail = tokenizer.decode(state.new_tokens[-(len(stop) + _WINDOW) :], skip_special_tokens=True)
        place = tail.find(stop)
        if place >= 0:
            behind = len(tail) - place - (len(stop) if state.include_stop else 0)
            return FinishReason.STOP_STRINGS, behind
    if len(state.new_tokens) >= state.max_new_tokens:
        return FinishReason.REACH_MAX_OUTPUT_LEN, 0
    if len(state.tokens) >= max_seq_len:
        return FinishReason.REACH_MAX_SEQ_LEN, 0
    return FinishReason.CONTINUE, 0
