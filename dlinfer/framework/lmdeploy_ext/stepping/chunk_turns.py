"""Let a decoding step run before each chunk of a long prompt, including the last chunk.

LMDeploy runs a decoding step between the chunks of a prompt, with two exceptions. It may run the last chunk right after
the chunk before it, and it may run a chunk right after short prompts. A chunk takes long on a host, and other users'
streams then wait for two prefills. Here the last chunk waits for one decoding step at most, because LMDeploy sends the
chunk after that step.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.pytorch.engine.inputs_maker:_ForwardInputsTask._should_defer_active_chunk",
    why="computes the last two chunks of a prompt in a row, while other requests wait for their next token",
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
