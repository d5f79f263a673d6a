"""Find the length that determines each token's rotary frequencies, under dynamic NTK scaling and longrope.

transformers chooses frequencies by the largest position of a forward call. If a prompt runs alone, its tokens get the
frequencies of the prompt's length. Each later token gets the frequencies of the text's length at that token. The
governing length of a token is therefore ``max(prompt length, position + 1)``. Batches, chunked prefill and preemption
must not change this length. So ``position_ids`` become [2, N]: positions in the first row, governing lengths in the
second.

Phi-3 and Phi-3.5-MoE differ: when a text outgrows the original length, transformers recomputes the text's whole cache
with the long factors. Here LMDeploy's scheduler then preempts the sequence, and prefills it again with all its tokens.
This prefill must not be split into chunks, because LMDeploy would decode the sequence between them. So the limit of
tokens in a prefill is raised to at least the original length + 1.

The prefix cache shares blocks only up to the original length, where all sequences have the same frequencies.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_parameters
from dlinfer.framework.patching import Original, replaces

logger = logging.getLogger("dlinfer")

FEATURE = "rotary frequencies by length"
_replaces = functools.partial(replaces, for_feature=FEATURE)

# transformers' classes that drop their cache when a text outgrows the original length.
_COMPUTED_ANEW = ("phi3", "phimoe")

# Attribute of an engine's inputs maker, scheduler and prefix tree: the model's RopeLengths.
_ATTRIBUTE = "dlinfer_rope_lengths"

# Attribute of a sequence: the length that governed its last prefill.
_CACHED_FOR = "dlinfer_cached_for"


@dataclass(frozen=True)
class RopeLengths:
    """The facts that scheduling needs about a model's rotary embedding.

    original: the original length. All texts up to this length have the same frequencies.
    computed_anew: whether the whole cache must be recomputed when a sequence outgrows this length.
    """

    original: int
    computed_anew: bool

    def govern(self, inputs: Any, sequences: list[Any]) -> None:
        """Set a prefill's ``inputs.target_position_ids`` to [2, N]: positions and governing lengths of new tokens."""
        rows = []
        for sequence, new in zip(sequences, inputs.seq_length.tolist(), strict=True):
            first = sequence.num_history_ids
            length = sequence.num_all_ids if self.computed_anew else sequence.input_end_pos
            rows.append(of_positions(torch.arange(first, first + new), length))
            setattr(sequence, _CACHED_FOR, length)
        inputs.target_position_ids = torch.cat(rows, dim=1)

    def outgrown_by(self, sequence: Any) -> bool:
        """Return whether the next token may exceed the original length while the cache has the short frequencies.

        LMDeploy may schedule a step before it knows the newest token, so the result is True one token early. This is
        harmless if LMDeploy already knows the newest token: a prefill then only computes one token more.
        """
        return self._is_short(sequence) and sequence.num_all_ids >= self.original

    def invalidates(self, sequence: Any) -> bool:
        """Return whether a waiting sequence has outgrown the original length, but its cache has short frequencies."""
        outgrown = sequence.num_history_ids > 0 and sequence.num_all_ids > self.original
        return outgrown and self._is_short(sequence)

    def _is_short(self, sequence: Any) -> bool:
        return self.computed_anew and getattr(sequence, _CACHED_FOR, self.original + 1) <= self.original


def of_model(config: Any) -> RopeLengths | None:
    """Return the RopeLengths of a text model's configuration; None if frequencies never depend on the length."""
    original = rope_parameters.original_length(config)
    if original is None:
        return None
    dynamic = rope_parameters.rope_type(rope_parameters.parameters(config)) == "dynamic"
    return RopeLengths(original, not dynamic and getattr(config, "model_type", "") in _COMPUTED_ANEW)


def of_positions(positions: Tensor, prompt_length: int) -> Tensor:
    """Return int64 [2, N]: the positions of one sequence, int64 [N], and their governing lengths."""
    return torch.stack((positions, (positions + 1).clamp(min=prompt_length)))


def of_step(context: Any) -> Tensor:
    """Return the position_ids of a StepContext: int64 [2, N] if the model needs governing lengths, else [1, N].

    LMDeploy passes no lengths for decoding steps and dummy inputs. A sequence's length is then its last position + 1.
    """
    positions = context.position_ids
    config = context.model_config.llm_config or context.model_config.hf_config
    if rope_parameters.original_length(config) is None or positions.shape[0] == 2:
        return positions
    q_seqlens = context.q_seqlens.long()
    last = positions[0, q_seqlens.cumsum(0) - 1] + 1
    lengths = torch.repeat_interleave(last, q_seqlens, output_size=positions.shape[1])
    return torch.stack((positions[0], lengths))


def _lengths(owner: Any) -> RopeLengths | None:
    return getattr(owner, _ATTRIBUTE, None)


def governs(maker: Any) -> bool:
    """Return whether the model's rotary frequencies depend on sequence lengths. maker: LMDeploy's inputs maker."""
    return _lengths(maker) is not None


@_replaces(
    "lmdeploy.pytorch.engine.inputs_maker:build_inputs_maker",
    why="does not tell the scheduler about the model's rotary embedding",
    when=activation.is_on,
)
def _inputs_maker(original: Original, engine: Any) -> Any:
    lengths = of_model(engine.model_config.llm_config or engine.model_config.hf_config)
    limit = engine.cache_config.max_prefill_token_num
    if lengths is not None and lengths.computed_anew and limit <= lengths.original:
        logger.warning(
            "max_prefill_token_num is raised to %d from %d: if a text outgrows this model's original length, one "
            "prefill "
            "has to recompute its whole cache",
            lengths.original + 1,
            limit,
        )
        engine.cache_config.max_prefill_token_num = lengths.original + 1
    maker = original(engine)
    for owner in (maker, engine.scheduler, engine.scheduler.block_trie):
        setattr(owner, _ATTRIBUTE, lengths)
    return maker


@_replaces(
    "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync.create_model_inputs",
    why="does not pass the prompt's length to the model, though dynamic and longrope frequencies depend on it",
)
def _model_inputs(original: Original, self: Any, messages: list[Any], is_prefill: bool) -> Any:
    inputs = original(self, messages, is_prefill)
    lengths = _lengths(self)
    if is_prefill and lengths is not None:
        lengths.govern(inputs, messages)
    return inputs


@_replaces(
    "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync.create_model_inputs_long_context",
    why="does not pass the whole prompt's length with a chunk, though it determines the chunk's rotary frequencies",
)
def _chunk_inputs(original: Original, self: Any, seq: Any, chunk_size: int, multimodals: Any = None) -> Any:
    inputs = original(self, seq, chunk_size, multimodals)
    lengths = _lengths(self)
    if lengths is not None:
        lengths.govern(inputs, [seq])
    return inputs


@_replaces(
    "lmdeploy.pytorch.paging.scheduler:Scheduler.schedule_running",
    why="goes on with the cached keys when a text outgrows the original length, where transformers recomputes "
    "Phi-3's cache",
)
def _schedule_running(
    original: Original, self: Any, running: list[Any], num_required_tokens: int = 1, prealloc_size: int = 1
) -> list[bool]:
    valid = original(self, running, num_required_tokens, prealloc_size)
    lengths = _lengths(self)
    if lengths is None:
        return valid
    # LMDeploy preempts the others once their last token is known, and then prefills them again.
    return [fits and not lengths.outgrown_by(sequence) for sequence, fits in zip(running, valid, strict=True)]


@_replaces(
    "lmdeploy.pytorch.paging.scheduler:Scheduler.schedule",
    why="reuses the blocks of a preempted sequence, though Phi-3's keys in them have other frequencies",
    signature="(self, is_prefill, prealloc_size=0, allow_long_prefill=True, prefer_long_prefill=False)",
)
def _schedule(original: Original, self: Any, is_prefill: bool, *args: Any, **options: Any) -> Any:
    lengths = _lengths(self)
    if is_prefill and lengths is not None:
        for sequence in self.waiting:
            if lengths.invalidates(sequence):
                sequence.state.release_paging_resources()
    return original(self, is_prefill, *args, **options)


def _shared_blocks(original: Original, self: Any, seq: Any) -> None:
    lengths = _lengths(self)
    if lengths is None or seq.num_all_ids < lengths.original:
        original(self, seq)


PATCHES = tuple(
    _replaces(
        f"lmdeploy.pytorch.paging.block_trie.trie:BlockTrie.{method}",
        why="shares blocks of keys beyond the original length, though their frequencies depend on each text's length",
    )(_shared_blocks)
    for method in ("match", "allocate")
)
