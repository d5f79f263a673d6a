"""The sampling parameters of a batch. Each parameter is an array with one value for each sequence."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.mindie_ext.errors import SamplingError
from dlinfer.framework.mindie_ext.sampling.deprecated import SamplingData, SamplingParam
from dlinfer.framework.mindie_ext.sampling.parameters import checked


@dataclass
class SamplingMetadata:
    """The sampling parameters of a batch, checked by ``from_numpy`` or ``from_batch``.

    Each array is [sequences]. An array that is None means the default of the parameter: repetition_penalty 1,
    frequency_penalty 0, presence_penalty 0, temperature 1, top_k_array 0, top_p_array 1, do_sample_array false,
    top_logprobs_array 0.

    max_logprobs: the largest value of top_logprobs_array.
    all_token_ids: [sequences, longest] int64, the tokens of prompts and answers, for the repetition penalty.
    output_token_ids: [sequences, longest] int64, the tokens of answers, for the other penalties.

    Padding in both is any value that is no token id.
    """

    batch_sequence_ids: list[np.ndarray]
    reserved_sequence_ids: list[np.ndarray] | None
    is_prefill: bool
    is_mix: bool
    all_sequence_ids: np.ndarray
    parent_sequence_ids: np.ndarray
    group_indices: list[tuple[int, int]]
    to_tensor: Callable[[Any], Tensor] | None = None
    repetition_penalty: np.ndarray | None = None
    frequency_penalty: np.ndarray | None = None
    presence_penalty: np.ndarray | None = None
    temperature: np.ndarray | None = None
    top_k_array: np.ndarray | None = None
    top_p_array: np.ndarray | None = None
    do_sample_array: np.ndarray | None = None
    top_logprobs_array: np.ndarray | None = None
    max_logprobs: int = 0
    seed_array: np.ndarray | None = None
    num_top_tokens: np.ndarray | None = None
    all_token_ids: np.ndarray | None = None
    output_token_ids: np.ndarray | None = None

    @classmethod
    def from_numpy(
        cls,
        batch_sequence_ids: list[np.ndarray],
        reserved_sequence_ids: list[np.ndarray] | None = None,
        is_prefill: bool = True,
        repetition_penalty: np.ndarray | None = None,
        frequency_penalty: np.ndarray | None = None,
        presence_penalty: np.ndarray | None = None,
        temperature: np.ndarray | None = None,
        top_k: np.ndarray | None = None,
        top_p: np.ndarray | None = None,
        do_sample: np.ndarray | None = None,
        top_logprobs: np.ndarray | None = None,
        seeds: np.ndarray | None = None,
        num_top_tokens: np.ndarray | None = None,
        n: np.ndarray | None = None,
        best_of: np.ndarray | None = None,
        use_beam_search: np.ndarray | None = None,
        to_tensor: Callable[[Any], Tensor] | None = None,
        all_sequence_ids: np.ndarray | None = None,
        is_mix: bool = False,
    ) -> "SamplingMetadata":
        """Return the checked metadata of a batch. The arguments are not mutated.

        batch_sequence_ids: the ids of the sequences of each request. all_sequence_ids: the ids of all sequences in
            order, [sequences]; None joins ``batch_sequence_ids``.
        seeds: None gives each sequence a random seed.

        The other arrays are [sequences]. Raises SamplingError. Raises UnsupportedFeatureError for beam search and for
        values above 1 of ``n`` and ``best_of``.
        """
        if not isinstance(is_prefill, bool):
            raise SamplingError(parameter="is_prefill", expected="a bool", given=repr(is_prefill))
        if not batch_sequence_ids:
            raise SamplingError(
                parameter="batch_sequence_ids", expected="at least one sequence", given="none"
            )
        ids = np.concatenate(batch_sequence_ids) if all_sequence_ids is None else np.asarray(all_sequence_ids)
        count = len(ids)
        for name, values in (("use_beam_search", use_beam_search), ("best_of", best_of), ("n", n)):
            if values is not None and np.any(
                np.asarray(values).astype(np.int64) > (name != "use_beam_search")
            ):
                raise UnsupportedFeatureError(
                    feature=f"{name} of several sequences",
                    where="dlinfer's sampler",
                    advice="send each sequence as a separate request",
                )
        draws = checked("do_sample", do_sample, count)
        draws = np.zeros(count, dtype=bool) if draws is None else draws.astype(bool)
        warm = checked("temperature", temperature, count)
        if warm is not None:
            draws &= warm > 0
        seed_array = checked("seeds", seeds, count)
        if seed_array is None:
            seed_array = np.asarray([secrets.randbits(63) for _ in range(count)], dtype=np.int64)
        top = checked("top_logprobs", top_logprobs, count)
        ends = np.cumsum([len(ids) for ids in batch_sequence_ids]).tolist()
        return cls(
            batch_sequence_ids=batch_sequence_ids,
            reserved_sequence_ids=reserved_sequence_ids,
            is_prefill=is_prefill,
            is_mix=is_mix,
            all_sequence_ids=ids.astype(np.int64),
            parent_sequence_ids=ids.astype(np.int64),
            group_indices=list(zip([0, *ends[:-1]], ends, strict=True)),
            to_tensor=to_tensor,
            repetition_penalty=checked("repetition_penalty", repetition_penalty, count),
            frequency_penalty=checked("frequency_penalty", frequency_penalty, count),
            presence_penalty=checked("presence_penalty", presence_penalty, count),
            temperature=warm,
            top_k_array=checked("top_k", top_k, count),
            top_p_array=checked("top_p", top_p, count),
            do_sample_array=draws,
            top_logprobs_array=top,
            max_logprobs=0 if top is None else int(top.max()),
            seed_array=seed_array.astype(np.int64),
            num_top_tokens=num_top_tokens,
        )

    @classmethod
    def from_batch(
        cls,
        input_metadata: Any,
        batch_sampling_params: np.ndarray,
        num_top_tokens: np.ndarray | None,
        to_tensor: Callable[[Any], Tensor] | None,
        **kwargs: Any,
    ) -> "SamplingMetadata":
        """Return the checked metadata of a step.

        input_metadata: the step's InputMetadata. batch_sampling_params: [sequences] records of SAMPLING_DTYPE.
        kwargs: batch_seeds, batch_best_of, batch_n, batch_use_beam_search and is_mix, as MindIE passes them.
        """
        return cls.from_numpy(
            batch_sequence_ids=input_metadata.batch_sequence_ids,
            reserved_sequence_ids=input_metadata.reserved_sequence_ids,
            is_prefill=bool(input_metadata.is_prefill),
            all_sequence_ids=input_metadata.all_sequence_ids,
            num_top_tokens=num_top_tokens,
            seeds=kwargs.get("batch_seeds"),
            best_of=kwargs.get("batch_best_of"),
            n=kwargs.get("batch_n"),
            use_beam_search=kwargs.get("batch_use_beam_search"),
            is_mix=bool(kwargs.get("is_mix")),
            to_tensor=to_tensor,
            **{name: batch_sampling_params[name] for name in batch_sampling_params.dtype.names or ()},
        )

    @classmethod
    def from_deprecated(
        cls, sampling_data: SamplingData, sampling_param: SamplingParam
    ) -> "SamplingMetadata":
        """Return the checked metadata for the two arguments of MindIE's deprecated form of ``sample``."""
        rows = sampling_data.count
        ids = np.arange(rows) if sampling_data.request_ids is None else sampling_data.request_ids
        metadata = cls.from_numpy(
            batch_sequence_ids=[ids[row : row + 1] for row in range(rows)],
            is_prefill=sampling_data.is_prefill,
            **sampling_param.arrays,
        )
        metadata.update_token_ids(sampling_data.all_input_ids, sampling_data.output_ids)
        return metadata

    def update_token_ids(self, all_token_ids: np.ndarray | None, output_token_ids: np.ndarray | None) -> None:
        """Set the tokens of the sequences so far. None keeps the tokens that are set. Raises SamplingError.

        all_token_ids, output_token_ids: [sequences, longest] integers.
        """
        for name, ids in (("all_token_ids", all_token_ids), ("output_token_ids", output_token_ids)):
            if ids is None:
                continue
            rows = np.asarray(ids)
            if rows.ndim != 2 or rows.dtype.kind not in "iu" or len(rows) != len(self.all_sequence_ids):
                expected = f"[{len(self.all_sequence_ids)}, tokens] integers"
                raise SamplingError(parameter=name, expected=expected, given=f"{rows.dtype} {rows.shape}")
            setattr(self, name, rows.astype(np.int64))
