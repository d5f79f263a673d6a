"""Never put requests that score their input and requests that generate tokens into one prefill.

LMDeploy samples nothing in such a prefill. The requests for tokens then end with token 0 as their text, and the next
step ends the engine's loop.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.pytorch.paging.prefill_scheduler:_PrefillScheduler.schedule",
    why="puts requests for logprobs of their input and requests for tokens into one prefill, which samples nothing. "
    "The requests for tokens end with token 0 as their text, and the next step ends the engine's loop",
    signature="(self, *, waiting, stopped, num_ready, num_running, turn_policy, prealloc_size=0)",
)
def _schedule(
    original: Original, self: Any, *, waiting: list[Any], stopped: list[Any], **others: Any
) -> list[Any]:
    if waiting:
        first = min(waiting, key=lambda seq: seq.arrive_time)
        other = [seq for seq in waiting if _scores(seq) != _scores(first)]
        waiting = [seq for seq in waiting if _scores(seq) == _scores(first)]
        stopped = stopped + other  # LMDeploy may reclaim their blocks, as before
    return original(self, waiting=waiting, stopped=stopped, **others)


def _scores(seq: Any) -> bool:
    """Return whether a sequence asks for the log-probabilities of its input. Then it generates no tokens."""
    return seq.logprob_start_pos >= 0
