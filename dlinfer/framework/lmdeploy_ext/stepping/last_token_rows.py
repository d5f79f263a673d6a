"""Make a compiled forward return only the rows of last tokens, if its step needs only each sequence's next token.

Without this, LMDeploy selects these rows from the result of the forward. It leaves a result with just one row for each
sequence as it is.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers import block_diffusion
from dlinfer.framework.patching import Original, replaces


@contextlib.contextmanager
def giving(agent: Any, last_only: bool) -> Iterator[None]:
    """In the ``with`` block, choose the rows that an agent's compiled model returns.

    last_only: return only the rows of last tokens; otherwise return all rows.
    """
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
    """Return whether a step reads only the rows of each sequence's last token.

    inputs: the step's ModelInputs. Their ``logits_indices`` name other rows if the step scores its input. A decoding
    step of several tokens verifies drafts. has_all_logits: whether the step returns the logits or the loss of all
    tokens.
    """
    verifies = inputs.is_decoding and inputs.max_q_seqlen > 1
    return not has_all_logits and not verifies and inputs.logits_indices is None


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
    others_read = others_read or block_diffusion.is_used(self.model_config)  # a block's tokens are read
    last_only = not others_read and are_enough(inputs, has_all_logits=return_logits)
    with giving(self, last_only):
        return await original(self, inputs, return_logits, cache_inputs)
