"""Prefill waiting prompts in small chunks while other requests decode, one chunk after each decoding step.

LMDeploy prefills all waiting prompts before it continues decoding, with thousands of tokens in a step. All streams wait
meanwhile, for milliseconds on a GPU and for seconds on a host. Here decoding steps and chunks of prompts alternate.
On a host, a decoding step and the chunk after it share a forward (joined_forward.py). Decoding then costs next to
nothing, because a matrix product reads the weights once for all rows.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths
from dlinfer.framework.lmdeploy_ext.stepping import ending_sequences as last_tokens
from dlinfer.framework.lmdeploy_ext.stepping import prompt_pace
from dlinfer.framework.patching import Original, replaces

FOLLOWED = "dlinfer_followed"
"""Key of a decoding step's forward inputs: whether a chunk of prompts will be sent right after this step."""


RANKS_BESIDE = 256
"""The most prompt tokens of a step while sequences decode, if several ranks run. Steps of ranks are not timed."""


def _takes_turns(maker: Any, is_ahead: bool) -> bool:
    """Return whether decoding steps and chunks of prompts are to alternate.

    That is the case if a sequence needs further decoding steps, and prompts may be divided into chunks.
    maker: LMDeploy's InputsMaker. is_ahead: whether the previous step is still being computed.
    """
    if activation.device().seconds_beside_decoding is None or rope_lengths.governs(maker):
        return False
    return last_tokens.decodes_on(maker, is_ahead)


def _prompt_limit(maker: Any, is_ahead: bool) -> int | None:
    """Return the most prompt tokens of the next step; None for LMDeploy's own limit.

    maker: LMDeploy's InputsMaker. is_ahead: whether the previous step is still being computed.
    """
    device, decodes = activation.device(), _takes_turns(maker, is_ahead)
    seconds = device.seconds_beside_decoding if decodes else device.seconds_of_prompts
    if seconds is None or rope_lengths.governs(maker):
        return None
    if not _is_one_process(maker.executor):
        return RANKS_BESIDE if decodes else None
    block = maker.scheduler.cache_config.block_size
    return max(block, prompt_pace.of(maker.executor.model_agent).tokens(seconds, decodes=decodes))


def _set_limits(maker: Any, limit: int | None) -> None:
    """Set the most prompt tokens of a step, for the scheduler and for chunks of a long prompt.

    maker: LMDeploy's InputsMaker. limit: the number of tokens; None for LMDeploy's own limit. Call this between two
    forwards.
    """
    most = maker.config.max_prefill_token_num
    tokens = most if limit is None else min(most, limit)
    block = getattr(maker.engine_strategy, "dllm_block_length", 1)  # of block diffusion
    tokens -= tokens % block
    chunker = maker.long_context_chunker
    if tokens == chunker.max_prefill_token_num == most:
        return
    from lmdeploy.pytorch.long_context import get_long_context_chunk_limit

    maker.scheduler.cache_config.max_prefill_token_num = chunker.max_prefill_token_num = tokens
    if chunker.enabled():
        chunker.max_prefill_num = get_long_context_chunk_limit(chunker.seq, tokens)


def _has_prompts(maker: Any) -> bool:
    """Return whether a prompt can be prefilled now.

    That is the case if a long prompt has chunks left, or if prompts wait and the batch has room.
    """
    if maker.long_context_chunker.enabled():
        return True
    return maker.scheduler.has_waiting() and len(maker.running_seqs) < maker.config.max_batches


_MAKER = "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync"


@replaces(
    f"{_MAKER}.do_prefill_default",
    why="prefills all waiting prompts before it goes on decoding, so on a host every stream stands still for seconds",
    when=activation.is_on,
    essential=False,
)
def _do_prefill(original: Original, self: Any) -> bool:
    if not _takes_turns(self, is_ahead=True):
        return original(self)
    return self._last_forward_kind == "decode" and _has_prompts(self)


@replaces(
    f"{_MAKER}._make_forward_inputs",
    why="has one limit for a prefill's tokens, whether or not other requests wait for their next token",
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
    _set_limits(self, _prompt_limit(self, is_ahead))
    step = original(self, prefill, enable_empty)
    last_tokens.note(self, step)
    if step is None or not activation.is_synchronous():
        return step
    # A step that decodes because no prompt could be admitted is followed by another one.
    decodes = step["inputs"] is None and step["delta"] is not None
    takes_turns = decodes and not prefill and _takes_turns(self, is_ahead=True)
    step[FOLLOWED] = takes_turns and _has_prompts(self)
    return step


def _would_decode_in_vain(maker: Any) -> bool:
    """Return whether another decoding step would be wasted, because all running sequences end with the current step.

    They end if they reach their length limit. If a sequence continues after all, a later step decodes it.
    """
    if not maker.running_seqs or last_tokens.decodes_on(maker, is_ahead=True):
        return False
    # With a KV connector each step carries messages to an external store of caches.
    return not maker.long_context_chunker.enabled() and not maker.scheduler.has_kv_connector()


def _is_one_process(executor: Any) -> bool:
    """Return whether LMDeploy's engine runs the model in its own process. Steps are timed only then."""
    from lmdeploy.pytorch.engine.executor.uni_executor import UniExecutor

    return isinstance(executor, UniExecutor)
