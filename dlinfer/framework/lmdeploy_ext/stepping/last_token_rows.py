"""Steps that ask for each sequence's next token alone: their compiled forward returns the last tokens' rows alone.

LMDeploy selects the last rows of a result with all rows, and takes a result with one row a sequence as it is.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces


@contextlib.contextmanager
def giving(agent: Any, last_only: bool) -> Iterator[None]:
    """For the time of a forward, let an agent's compiled model return the last tokens' rows, or all."""
    runner = agent.patched_model
    before = getattr(runner, "last_rows_only", None)
    if before is None:
        yield
        return
    runner.last_rows_only = last_only
    try:
        yield
    finally:
        runner.last_rows_only = before


def are_enough(inputs: Any, *, has_all_logits: bool) -> bool:
    """Whether a step reads no other row. inputs: its ModelInputs. has_all_logits: it returns logits, or their loss.

    A step that scores its input names the rows whose logits it needs.
    """
    return not has_all_logits and inputs.logits_indices is None


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent._async_model_forward",
    why="computes a prompt's last layer for all its tokens, though only the last one is read",
    when=activation.is_on,
    essential=False,
)
async def _async_model_forward(
    original: Original, self: Any, inputs: Any, return_logits: bool, cache_inputs: Any = None
) -> dict[str, Any]:
    # A draft model reads the hidden states of all tokens.
    others_read = self.spec_agent.is_enabled() or getattr(self, "memdecode_agent", None) is not None
    last_only = not others_read and are_enough(inputs, has_all_logits=return_logits)
    with giving(self, last_only):
        return await original(self, inputs, return_logits, cache_inputs)
