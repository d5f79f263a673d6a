"""Let a compiled forward return only the rows of last tokens, if its step needs only each sequence's next token.

LMDeploy itself selects these rows from a result, unless the result has just one row for each sequence.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces


@contextlib.contextmanager
def giving(agent: Any, last_only: bool) -> Iterator[None]:
    """Within the context, let an agent's compiled model return all rows; if ``last_only``, only last tokens' rows."""
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
    """Return whether a step reads only the rows of last tokens.

    inputs: the step's ModelInputs. If the step scores its input, they name the rows to read. has_all_logits: whether
    the step returns the logits or the loss of all tokens.
    """
    return not has_all_logits and inputs.logits_indices is None


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent._async_model_forward",
    why="computes a prompt's last layer for all its tokens, though only the last token's row is read",
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
