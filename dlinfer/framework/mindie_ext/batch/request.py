"""A server's request: a prompt, its sampling parameters, and the blocks of its sequence."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dlinfer.framework.mindie_ext.errors import GeneratorCallError
from dlinfer.framework.mindie_ext.sampling import DEFAULT_SAMPLING_PARAMS, SAMPLING_DTYPE


@dataclass
class GenerationParams:
    """The generation parameters of a request, with MindIE's names. None means the default.

    adapter_id: the LoRA adapter of the request.
    ignore_eos: continue after an end-of-sequence token.
    logprobs: whether to return log-probabilities.
    max_new_tokens: the most tokens to generate. By default only the model's limit applies.
    seed: the seed for sampling.
    stop_token_ids: tokens, or lists of consecutive tokens, that end the answer.
    stop_strings: texts that end the answer. They need a tokenizer.
    best_of, n, use_beam_search, response_format, length_penalty: only values without an effect are allowed.
    """

    adapter_id: str | None = None
    best_of: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    length_penalty: float | None = None
    logprobs: Any = None
    max_new_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    stop_strings: list[str] | None = None
    stop_token_ids: list[int | list[int]] | None = None
    use_beam_search: bool | None = None
    response_format: str | None = None


@dataclass
class Sequence:
    """One sequence of a request. block_tables: the sequence's blocks in order, int32. The server sets them."""

    seq_id: int
    block_tables: np.ndarray | None = None


class Request:
    """A request. The server keeps it from the prefill to the last token.

    block_tables: [blocks] int32, the blocks of the request's sequence, in order.
    split_start_position, split_end_position: the range of the sequence's tokens that the next mixed step computes.
    last_prompt: whether the next mixed step reaches the end of the prompt, and so samples a token.
    """

    def __init__(
        self,
        req_id: int,
        seq_id: int,
        input_ids: np.ndarray,
        generation_params: GenerationParams,
        has_sampling: bool = False,
        sampling_params: np.ndarray | None = None,
    ) -> None:
        prompt = np.asarray(input_ids)
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            actual = f"{prompt.dtype} {prompt.shape}"
            raise GeneratorCallError(
                call="Request", argument="input_ids", expected="[tokens] integers", given=actual
            )
        self.req_id = req_id
        self.input_ids = prompt.astype(np.int64)
        self.generation_params = generation_params
        self.has_sampling = has_sampling
        self.sampling_params = sampling_params
        self.sequences = {seq_id: Sequence(seq_id)}
        self.reserved_seq_ids: list[int] = []
        self.split_start_position = 0
        self.split_end_position = len(prompt)
        self.last_prompt = True

    @property
    def input_length(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.input_ids)

    @property
    def block_tables(self) -> np.ndarray | None:
        """The blocks of the request's only sequence, or None before the server sets them."""
        return next(iter(self.sequences.values())).block_tables

    @block_tables.setter
    def block_tables(self, blocks: np.ndarray) -> None:
        next(iter(self.sequences.values())).block_tables = np.asarray(blocks, dtype=np.int32)

    @classmethod
    def request_from_token(
        cls,
        input_ids: Any,
        sampling_params: np.ndarray | None,
        generation_params: GenerationParams | None = None,
        req_id: int = 0,
        seq_id: int | None = None,
    ) -> "Request":
        """Return a request for a prompt of token ids. sampling_params: one record of SAMPLING_DTYPE, [1], or None."""
        return cls(
            req_id,
            req_id if seq_id is None else seq_id,
            np.asarray(input_ids),
            generation_params or GenerationParams(),
            sampling_params is not None,
            sampling_params,
        )


def sampling_record(**params: float) -> np.ndarray:
    """Return one record of SAMPLING_DTYPE, [1], with MindIE's defaults for missing parameters."""
    unknown = sorted(set(params) - set(DEFAULT_SAMPLING_PARAMS))
    if unknown:
        known = ", ".join(DEFAULT_SAMPLING_PARAMS)
        raise GeneratorCallError(
            call="sampling_record", argument=unknown[0], expected=known, given=unknown[0]
        )
    values = DEFAULT_SAMPLING_PARAMS | params
    return np.array([tuple(values[name] for name, _ in SAMPLING_DTYPE)], dtype=SAMPLING_DTYPE)
