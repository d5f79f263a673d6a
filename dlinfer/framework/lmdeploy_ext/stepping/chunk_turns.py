"""Decoding has a turn before each chunk of a long prompt, the last one too.

LMDeploy puts a decoding step between the chunks of a prompt. But it sends the last two in a row where the scheduler is
free to prefill, and a chunk right after short prompts. On a host a chunk takes long, and other users' streams stand
still for two of them. After a decoding step the last chunk is sent by LMDeploy's own rule, so it waits for one step at
most.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.pytorch.engine.inputs_maker:_ForwardInputsTask._should_defer_active_chunk",
    why="computes the last two chunks of a prompt in a row, while others wait for their next token",
    when=activation.is_on,
    essential=False,
)
def _should_defer(original: Original, self: Any) -> bool:
    if original(self):
        return True
    from lmdeploy.pytorch.disagg.config import EngineRole

    maker = self.maker
    return (
        maker.config.role != EngineRole.Prefill
        and maker.long_context_chunker.enabled()
        and len(maker.running_seqs) > 0
        and maker._last_forward_kind != "decode"
    )
