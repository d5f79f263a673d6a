"""The input of one step, as MindIE's scheduler describes it: arrays with one entry for each request."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.mindie_ext.batch.request import GenerationParams, Request
from dlinfer.framework.mindie_ext.errors import GeneratorCallError
from dlinfer.framework.mindie_ext.sampling import SAMPLING_DTYPE


@dataclass
class InputMetadata:
    """A batch of prefills, of decodes or, with ``is_mix``, of both.

    All arrays have one entry for each request, in order.

    batch_request_ids, batch_max_output_lens: [requests] int64.
    batch_sequence_ids: for each request an array [1] with the id of its sequence.
    block_tables: [requests, blocks] int32, padded with -1.
    reserved_sequence_ids: must be empty.
    input_ids: the tokens that this step prefills, concatenated. A decode brings no tokens: the generator knows them.
    batch_seq_len: how many tokens of each request this step computes.
    batch_sampling_params: [requests] records of SAMPLING_DTYPE. A record of NaN means the generator's defaults.
    batch_ignore_eos: one flag for each request. None means the generator's default.
    batch_is_prefill, split_start_position, split_end_position, batch_last_prompt: only for mixed steps.

    Some fields belong to features of MindIE that dlinfer does not serve. A request with such a feature is refused.
    """

    batch_size: int
    batch_request_ids: np.ndarray
    batch_sequence_ids: list[np.ndarray]
    batch_max_output_lens: np.ndarray
    block_tables: np.ndarray
    reserved_sequence_ids: list[np.ndarray] = field(default_factory=list)
    has_sampling: bool = True
    is_mix: bool | None = None
    is_prefill: bool = False
    max_block_size: int = 128
    adapter_ids: list[str | None] | None = None
    batch_best_of: np.ndarray | None = None
    batch_use_beam_search: np.ndarray | None = None
    batch_response_format: list[str | None] | None = None
    batch_ignore_eos: np.ndarray | list[bool | None] | None = None
    batch_logprobs: np.ndarray | None = None
    batch_sampling_params: np.ndarray | None = None
    batch_seeds: list[int | None] | None = None
    batch_seq_len: np.ndarray | None = None
    batch_stop_token_ids: list[list[int | list[int]] | None] | None = None
    batch_stop_strings: list[list[str] | None] | None = None
    batch_include_stop: list[bool | None] | None = None
    input_ids: np.ndarray | None = None
    trace_ids: list[Any] | None = None
    batch_is_prefill: np.ndarray | None = None
    split_start_position: np.ndarray | None = None
    split_end_position: np.ndarray | None = None
    batch_last_prompt: np.ndarray | None = None
    computed_blocks: np.ndarray | None = None
    all_sequence_ids: np.ndarray = field(init=False)
    """[requests] int64: the sequence ids of all requests, concatenated."""

    def __post_init__(self) -> None:
        for ids in self.batch_sequence_ids:
            if len(ids) != 1:
                _refuse(f"{len(ids)} sequences in a request")
        if any(len(ids) for ids in self.reserved_sequence_ids):
            _refuse("reserved_sequence_ids, which belong to several sequences in a request,")
        if self.batch_best_of is not None and any((best_of or 1) > 1 for best_of in self.batch_best_of):
            _refuse("best_of > 1")
        if self.batch_use_beam_search is not None and any(
            bool(beams) for beams in self.batch_use_beam_search
        ):
            _refuse("beam search")
        if self.batch_response_format is not None and any(self.batch_response_format):
            _refuse("response_format (guided decoding)")
        if self.computed_blocks is not None and np.any(self.computed_blocks):
            _refuse("a prefix cache (computed_blocks)")
        if not self.batch_sequence_ids:
            raise GeneratorCallError(
                call="InputMetadata",
                argument="batch_sequence_ids",
                expected="at least one request",
                given="none",
            )
        self.all_sequence_ids = np.concatenate(self.batch_sequence_ids).astype(np.int64)
        if len(set(self.all_sequence_ids.tolist())) != len(self.all_sequence_ids):
            raise GeneratorCallError(
                call="InputMetadata",
                argument="batch_sequence_ids",
                expected="different sequence ids",
                given=self.all_sequence_ids.tolist(),
            )

    @classmethod
    def from_requests(
        cls,
        llm_requests: Several[Request],
        req_block_tables: np.ndarray | None = None,
        is_prefill: bool | np.ndarray = False,
        max_block_size: int = 128,
    ) -> "InputMetadata":
        """Return the metadata of a step.

        req_block_tables: [requests, blocks], padded with -1; None takes the block tables of the requests.
        is_prefill: one flag for all requests or, for a mixed step, [requests] bool.
        max_block_size: the number of slots of a KV-cache block.
        """
        requests = list(llm_requests)
        mixed = isinstance(is_prefill, np.ndarray)
        kinds = (
            [bool(flag) for flag in is_prefill]
            if isinstance(is_prefill, np.ndarray)
            else [is_prefill] * len(requests)
        )
        if len(kinds) != len(requests):
            raise GeneratorCallError(
                call="InputMetadata.from_requests",
                argument="is_prefill",
                expected=f"{len(requests)} flags",
                given=len(kinds),
            )
        params = [request.generation_params for request in requests]
        prompts = [
            r.input_ids[r.split_start_position : r.split_end_position] if mixed else r.input_ids
            for r, prefill in zip(requests, kinds, strict=True)
            if prefill
        ]
        starts = np.asarray([r.split_start_position for r in requests]) if mixed else None
        ends = np.asarray([r.split_end_position for r in requests]) if mixed else None
        lengths = ends - starts if starts is not None and ends is not None else None
        if lengths is None:
            lengths = np.asarray(
                [r.input_length if kind else 1 for r, kind in zip(requests, kinds, strict=True)]
            )
        return cls(
            batch_size=len(requests),
            batch_request_ids=np.asarray([r.req_id for r in requests], dtype=np.int64),
            batch_sequence_ids=[np.asarray(list(r.sequences), dtype=np.int64) for r in requests],
            batch_max_output_lens=np.asarray([_limit(p) for p in params], dtype=np.int64),
            block_tables=form_block_tables(requests) if req_block_tables is None else req_block_tables,
            reserved_sequence_ids=[np.asarray(r.reserved_seq_ids, dtype=np.int64) for r in requests],
            has_sampling=any(r.has_sampling for r in requests),
            is_mix=any(kinds) and not all(kinds) if mixed else None,
            is_prefill=any(kinds),
            max_block_size=max_block_size,
            adapter_ids=[p.adapter_id for p in params],
            batch_best_of=np.asarray([p.best_of or p.n or 1 for p in params]),
            batch_use_beam_search=np.asarray([bool(p.use_beam_search) for p in params]),
            batch_response_format=[p.response_format for p in params],
            batch_ignore_eos=[p.ignore_eos for p in params],
            batch_logprobs=np.asarray([bool(p.logprobs) for p in params]),
            batch_sampling_params=_records(requests),
            batch_seeds=[p.seed for p in params],
            batch_seq_len=lengths,
            batch_stop_token_ids=[p.stop_token_ids for p in params],
            batch_stop_strings=[p.stop_strings for p in params],
            batch_include_stop=[p.include_stop_str_in_output for p in params],
            input_ids=np.concatenate(prompts) if prompts else np.zeros(0, dtype=np.int64),
            batch_is_prefill=np.asarray(kinds) if mixed else None,
            split_start_position=starts,
            split_end_position=ends,
            batch_last_prompt=np.asarray([r.last_prompt for r in requests]) if mixed else None,
        )


NO_LIMIT = np.iinfo(np.int64).max


def _limit(params: GenerationParams) -> int:
    return NO_LIMIT if params.max_new_tokens is None else params.max_new_tokens


def form_block_tables(requests: Several[Request]) -> np.ndarray:
    """Return the blocks of each request, [requests, blocks] int32, padded with -1."""
    tables = [request.block_tables for request in requests]
    if any(table is None for table in tables):
        missing = next(r.req_id for r, table in zip(requests, tables, strict=True) if table is None)
        raise GeneratorCallError(
            call="InputMetadata", argument="block_tables", expected="blocks for each request", given=missing
        )
    rows = [table for table in tables if table is not None]
    result = np.full((len(rows), max(map(len, rows), default=0)), -1, dtype=np.int32)
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result


def _records(requests: Several[Request]) -> np.ndarray | None:
    """Return a sampling record for each request, or None if no request has parameters.

    A request without parameters gets a record of NaN.
    """
    if all(r.sampling_params is None for r in requests):
        return None
    none = np.array([(np.nan,) * len(SAMPLING_DTYPE)], dtype=SAMPLING_DTYPE)
    return np.concatenate([none if r.sampling_params is None else r.sampling_params[:1] for r in requests])


def _refuse(feature: str) -> None:
    raise UnsupportedFeatureError(
        feature=feature,
        where="dlinfer's GeneratorTorch",
        advice="leave it out; send several sequences as separate requests",
    )
