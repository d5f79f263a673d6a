"""Convert the metadata of a step to the inputs of the step's forward: tokens, positions and slots."""

from dataclasses import dataclass

import numpy as np

from dlinfer.framework.mindie_ext.batch.context import SequenceState, SequenceStore, new_state
from dlinfer.framework.mindie_ext.batch.input_metadata import InputMetadata
from dlinfer.framework.mindie_ext.batch.model_input import ModelInput
from dlinfer.framework.mindie_ext.errors import GeneratorCallError


@dataclass(frozen=True)
class Limits:
    """The limits of one step, from the generator's config and its KV pool.

    block_size: slots in a block. blocks: blocks in the pool. max_seq_len: the most tokens of a sequence.
    max_batch_size: the most sequences in a step; 0 means no limit. vocab_size: all token ids are below it.
    ignore_eos: the value for requests that do not set ignore_eos.
    """

    block_size: int
    blocks: int
    max_seq_len: int
    max_batch_size: int
    vocab_size: int
    ignore_eos: bool = False


@dataclass(frozen=True)
class Step:
    """The inputs of a step's forward, and the requests of the step.

    states: the state of each request's sequence. The state of a new sequence is not in the store yet. draws: indices of
    the requests that get a token in this step.
    """

    model_input: ModelInput
    states: list[SequenceState]
    draws: list[int]


def compose(metadata: InputMetadata, store: SequenceStore, limits: Limits) -> Step:
    """Return the inputs of a step's forward, and the requests' states. New sequences are not stored yet.

    Raises GeneratorCallError.
    """
    requests = len(metadata.batch_sequence_ids)
    if limits.max_batch_size and requests > limits.max_batch_size:
        _refuse("batch_size", f"at most {limits.max_batch_size} (max_batch_size)", requests)
    if metadata.block_tables.ndim != 2 or len(metadata.block_tables) != requests:
        _refuse("block_tables", f"[{requests}, blocks]", metadata.block_tables.shape)
    input_ids = np.zeros(0, dtype=np.int64) if metadata.input_ids is None else np.asarray(metadata.input_ids)
    tokens: list[int] = []
    positions: list[int] = []
    states: list[SequenceState] = []
    ends: list[int] = []
    counts: list[int] = []
    draws: list[int] = []
    taken = 0
    for index, sequence_id in enumerate(metadata.all_sequence_ids.tolist()):
        prefill = _is_prefill(metadata, index)
        if prefill:
            start, end = _piece(metadata, index)
            new = input_ids[taken : taken + end - start].tolist()
            taken += end - start
            state = _prefilled(metadata, store, index, sequence_id, (start, end), new, limits.ignore_eos)
            _check_tokens(new, limits.vocab_size, sequence_id)
            last = metadata.batch_last_prompt is None or bool(metadata.batch_last_prompt[index])
        else:
            state = _decoded(store, sequence_id)
            start, end, new, last = state.kv_length, state.kv_length + 1, state.tokens[-1:], True
        if end > limits.max_seq_len:
            _refuse("input_ids", f"sequences of at most {limits.max_seq_len} tokens (max_seq_len)", end)
        tokens += new
        positions += range(start, end)
        states.append(state)
        ends.append(end)
        counts.append(end - start)
        if last:
            draws.append(index)
    if taken != len(input_ids):
        _refuse("input_ids", f"the {taken} tokens of the prefilled requests", len(input_ids))
    lengths = np.asarray(ends, dtype=np.int64)
    query_length = np.asarray(counts, dtype=np.int64)
    tables = blocks_of(metadata.block_tables, lengths, limits)
    slots = slots_of(tables, np.asarray(positions), query_length, limits.block_size)
    model_input = ModelInput(
        input_ids=np.asarray(tokens, dtype=np.int64),
        position_ids=np.asarray(positions, dtype=np.int64),
        block_tables=tables,
        slots=slots,
        context_length=lengths,
        max_seq_len=int(lengths.max()),
        prefill_head_indices=(np.cumsum(query_length) - 1)[draws],
        is_prefill=bool(metadata.is_prefill),
        query_length=query_length,
        adapter_ids=[state.adapter_id for state in states],
    )
    return Step(model_input, states, draws)


def blocks_of(block_tables: np.ndarray, lengths: np.ndarray, limits: Limits) -> np.ndarray:
    """Return the blocks that each sequence needs: [sequences, n] int32, padded with 0.

    n: the most blocks of a sequence.

    lengths: the number of keys of each sequence. Raises GeneratorCallError if a sequence has too few blocks or names a
    block that does not exist.
    """
    needed = -(-lengths // limits.block_size)
    most = int(needed.max())
    if block_tables.shape[1] < most:
        _refuse("block_tables", f"{most} blocks for {int(lengths.max())} tokens", block_tables.shape[1])
    tables = block_tables[:, :most].astype(np.int64)
    used = np.arange(most) < needed[:, None]
    wrong = used & ((tables < 0) | (tables >= limits.blocks))
    if wrong.any():
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        expected = f"a block below {limits.blocks} at [{row}, {column}], for {int(lengths[row])} tokens"
        _refuse("block_tables", expected, int(tables[row, column]))
    return np.where(used, tables, 0).astype(np.int32)


def slots_of(tables: np.ndarray, positions: np.ndarray, counts: np.ndarray, block_size: int) -> np.ndarray:
    """Return the slot of each token, [tokens] int64. Raises GeneratorCallError if two tokens would share a slot.

    tables: the blocks of each sequence. positions: [tokens], the position of each token in its sequence. counts: how
    many of the tokens belong to each sequence.
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    if len(np.unique(slots)) != len(slots):
        _refuse("block_tables", "a separate slot for each new token", "two tokens in one slot")
    return slots


def _is_prefill(metadata: InputMetadata, index: int) -> bool:
    if metadata.batch_is_prefill is not None:
        return bool(metadata.batch_is_prefill[index])
    return metadata.is_prefill


def _piece(metadata: InputMetadata, index: int) -> tuple[int, int]:
    """Return (start, end): the range of a prefill request's tokens that this step computes."""
    if metadata.split_start_position is not None and metadata.split_end_position is not None:
        start, end = int(metadata.split_start_position[index]), int(metadata.split_end_position[index])
    elif metadata.batch_seq_len is not None:
        start, end = 0, int(metadata.batch_seq_len[index])
    else:
        return _refuse("batch_seq_len", "the length of each prompt", None)
    if not 0 <= start < end:
        _refuse("input_ids", "at least one token for each request", f"tokens {start} to {end}")
    return start, end


def _prefilled(
    metadata: InputMetadata,
    store: SequenceStore,
    index: int,
    sequence_id: int,
    piece: tuple[int, int],
    new: list[int],
    ignore_eos: bool,
) -> SequenceState:
    start, end = piece
    if len(new) != end - start:
        _refuse("input_ids", f"{end - start} tokens of sequence {sequence_id}", len(new))
    if start == 0:
        return new_state(metadata, index, new, ignore_eos)
    state = store.get(sequence_id)
    if state is None or state.prompt_length is not None or state.kv_length != start:
        known = "an unknown sequence" if state is None else f"{state.kv_length} computed tokens"
        _refuse("split_start_position", f"the number of computed tokens of sequence {sequence_id}", known)
    assert state is not None
    state.tokens = state.tokens[:start] + new
    return state


def _decoded(store: SequenceStore, sequence_id: int) -> SequenceState:
    state = store.get(sequence_id)
    if state is None or state.prompt_length is None:
        known = "an unknown one" if state is None else "one with an incomplete prefill"
        _refuse("batch_sequence_ids", f"a prefilled sequence ({sequence_id})", known)
    assert state is not None
    return state


def _check_tokens(tokens: list[int], vocab_size: int, sequence_id: int) -> None:
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        _refuse("input_ids", f"token ids from 0 to {vocab_size - 1} in sequence {sequence_id}", wrong)


def _refuse(argument: str, expected: str, actual: object) -> tuple[int, int]:
    raise GeneratorCallError(call="generate_token", argument=argument, expected=expected, given=actual)
