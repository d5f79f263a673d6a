"""The state that a generator keeps for each sequence between two steps."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from dlinfer.framework.mindie_ext.batch.input_metadata import InputMetadata


@dataclass
class SequenceState:
    """The state of one sequence.

    tokens: the prompt and the answer so far. kv_length: how many tokens have keys and values in the KV pool.
    prompt_length: None until the whole prompt is computed. seed: the request's seed for sampling, or a random seed.
    """

    tokens: list[int]
    max_new_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int | list[int]]
    stop_strings: list[str]
    include_stop: bool
    sampling: np.ndarray | None
    seed: int
    adapter_id: str | None
    kv_length: int = 0
    prompt_length: int | None = None
    cumulative_logprob: float = 0.0
    new_tokens: list[int] = field(default_factory=list)


class SequenceStore:
    """The states of a generator's sequences, by sequence id."""

    def __init__(self) -> None:
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, sequence_id: int) -> SequenceState | None:
        return self._states.get(sequence_id)

    def put(self, sequence_id: int, state: SequenceState) -> None:
        """Store the state of a sequence. A state with the same id is replaced."""
        self._states[sequence_id] = state

    def clear(self, sequence_ids: Iterable[int]) -> None:
        """Remove sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._states.pop(int(sequence_id), None)


def new_state(metadata: InputMetadata, index: int, tokens: list[int], ignore_eos: bool) -> SequenceState:
    """Return the state of the request ``index``, whose prompt begins in this step.

    tokens: the tokens of the prompt that this step computes. ignore_eos: the value if the request sets none.
    """

    def of(name: str, default: object = None) -> object:
        values = getattr(metadata, name)
        return default if values is None or values[index] is None else values[index]

    records = metadata.batch_sampling_params
    record = (
        None if records is None or np.isnan(records[index]["temperature"]) else records[index : index + 1]
    )
    seed, adapter = of("batch_seeds"), of("adapter_ids")
    stop_ids, stop_strings = of("batch_stop_token_ids", []), of("batch_stop_strings", [])
    assert isinstance(stop_ids, list)
    assert isinstance(stop_strings, list)
    return SequenceState(
        tokens=tokens,
        max_new_tokens=int(metadata.batch_max_output_lens[index]),
        ignore_eos=bool(of("batch_ignore_eos", ignore_eos)),
        stop_token_ids=stop_ids,
        stop_strings=stop_strings,
        include_stop=bool(of("batch_include_stop", False)),
        sampling=None if record is None else record.copy(),
        seed=secrets.randbits(63) if seed is None else int(str(seed)),
        adapter_id=None if adapter is None else str(adapter),
    )
