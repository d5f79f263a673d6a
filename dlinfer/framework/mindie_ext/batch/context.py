"""The state that a generator keeps for each sequence between two steps."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from dlinfer.framework.mindie_ext.batch.input_metadata import InputMetadata


@dataclass
class SequenceState:
    """One sequence. tokens: prompt and answer so far; kv_length: how many of them stand in the KV pool.

    prompt_length: None while the prompt is still computed in pieces. seed: of its draws, the request's or a random one.
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
    """The sequences of a generator by id."""

    def __init__(self) -> None:
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, sequence_id: int) -> SequenceState | None:
        """The sequence, or None where it is not known."""
        return self._states.get(sequence_id)

    def put(self, sequence_id: int, state: SequenceState) -> None:
        """Remember a sequence, in place of one of the same id."""
        self._states[sequence_id] = state

    def clear(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences; ids that are not known are passed over."""
        for sequence_id in sequence_ids:
            self._states.pop(int(sequence_id), None)


def new_state(metadata: InputMetadata, index: int, tokens: list[int], ignore_eos: bool) -> SequenceState:
    """The state of a request whose prompt begins with this step. ignore_eos: for a request that does not say."""

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
