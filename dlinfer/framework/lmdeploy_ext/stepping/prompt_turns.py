"""While some requests decode, waiting prompts are read in small portions, one after each decoding step.

LMDeploy reads all waiting prompts before it goes on decoding, thousands of tokens a step. That takes a GPU
milliseconds and a host seconds, and every stream stands still meanwhile. Here decoding and a portion of prompts take
turns. On devices of one process both are one forward (joined_forward.py). Decoding then adds next to nothing to the
step, since a product reads the weights once for all rows.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths
from dlinfer.framework.lmdeploy_ext.stepping import ending_sequences as last_tokens
from dlinfer.framework.patching import Original, replaces

FOLLOWED = "dlinfer_followed"
"""Key of a decoding step's forward inputs: whether a portion of prompts will be sent right after it."""


def _portion(maker: Any, is_ahead: bool) -> int | None:
    """The most tokens of prompts in a step beside the sequences that decode now; None for LMDeploy's own limit.

    is_ahead: whether the step before is still computed.
    """
    if rope_lengths.governs(maker) or not last_tokens.decodes_on(maker, is_ahead):
        return None
    beside = activation.device().prefill_tokens_beside_decoding
    if beside is None:
        return None
    return max(beside - len(maker.running_seqs), maker.scheduler.cache_config.block_size)


def _set_limits(maker: Any, portion: int | None) -> None:
    """Between two forwards: the scheduler's admission and the chunks of a long prompt go by the same limit."""
    most = maker.config.max_prefill_token_num
    limit = most if portion is None else min(most, portion)
    chunker = maker.long_context_chunker
    if limit == chunker.max_prefill_token_num == most:
        return
    from lmdeploy.pytorch.long_context import get_long_context_chunk_limit

    maker.scheduler.cache_config.max_prefill_token_num = chunker.max_prefill_token_num = limit
    if chunker.enabled():
        chunker.max_prefill_num = get_long_context_chunk_limit(chunker.seq, limit)


def _has_prompts(maker: Any) -> bool:
    """Whether a prompt could be read now: one that is read already, or a waiting one and room for it in the batch."""
    if maker.long_context_chunker.enabled():
        return True
    return maker.scheduler.has_waiting() and len(maker.running_seqs) < maker.config.max_batches


_MAKER = "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync"


@replaces(
    f"{_MAKER}.do_prefill_default",
    why="reads all waiting prompts before it goes on decoding: on a host every stream stands still for seconds",
    when=activation.is_on,
    essential=False,
)
def _do_prefill(original: Original, self: Any) -> bool:
    if _portion(self, is_ahead=True) is None:
        return original(self)
    return self._last_forward_kind == "decode" and _has_prompts(self)


@replaces(
    f"{_MAKER}._make_forward_inputs",
    why="knows one limit of a prefill's tokens, whether others wait for their next token or not",
    when=activation.is_on,
    essential=False,
)
def _make_forward_inputs(
    original: Original, self: Any, prefill: bool, enable_empty: bool = False
) -> dict[str, Any] | None:
    is_ahead = enable_empty  # LMDeploy sets it for a step that is made while another is computed
    if is_ahead and not prefill and _would_decode_in_vain(self):
        last_tokens.note(self, None)
        return None
    _set_limits(self, _portion(self, is_ahead))
    step = original(self, prefill, enable_empty)
    last_tokens.note(self, step)
    if step is None or not activation.is_synchronous() or not _is_one_process(self.executor):
        return step
    # A step that decodes because no prompt could be admitted is followed by another one.
    decodes = step["inputs"] is None and step["delta"] is not None
    takes_turns = decodes and not prefill and _portion(self, is_ahead=True) is not None
    step[FOLLOWED] = takes_turns and _has_prompts(self)
    return step


def _would_decode_in_vain(maker: Any) -> bool:
    """Whether the step could only decode sequences that all end with the step before, which still computes.

    A sequence that does not end there, though its length says so, is decoded by the step that is made then.
    """
    if not maker.running_seqs or last_tokens.decodes_on(maker, is_ahead=True):
        return False
    # With a connector each step carries messages about a store of caches elsewhere.
    return not maker.long_context_chunker.enabled() and not maker.scheduler.has_kv_connector()


def _is_one_process(executor: Any) -> bool:
    """Ranks of several processes would have to agree on what they compute together."""
    from lmdeploy.pytorch.engine.executor.uni_executor import UniExecutor

    return isinstance(executor, UniExecutor)
