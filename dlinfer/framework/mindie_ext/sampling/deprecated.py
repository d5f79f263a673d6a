"""``SamplingData`` and ``SamplingParam``: the two arguments of MindIE's deprecated form of ``sample``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlinfer.framework.mindie_ext.errors import SamplingError


@dataclass
class SamplingData:
    """The tokens of a batch's sequences.

    all_input_ids: [sequences, longest] integers, the tokens of prompts and answers, or None.
    output_ids: [sequences, longest] integers, the tokens of answers, or None.
    request_ids: [sequences]. None means that sequences are numbered by row, so that a draw depends on the row.
    """

    all_input_ids: np.ndarray | None
    output_ids: np.ndarray | None
    is_prefill: bool = True
    request_ids: np.ndarray | None = None

    @classmethod
    def from_numpy(
        cls,
        all_input_ids: np.ndarray | None = None,
        output_ids: np.ndarray | None = None,
        to_tensor: Callable[[Any], Any] | None = None,
        is_prefill: bool = True,
        request_ids: np.ndarray | None = None,
    ) -> "SamplingData":
        """Return a SamplingData. Raises SamplingError if all arrays are None, or if the arrays differ in length."""
        arrays = [array for array in (all_input_ids, output_ids, request_ids) if array is not None]
        if not arrays or len({len(array) for array in arrays}) != 1:
            raise SamplingError(
                parameter="SamplingData",
                expected="arrays of equal length",
                given=[len(array) for array in arrays],
            )
        return cls(all_input_ids, output_ids, is_prefill, request_ids)

    @property
    def count(self) -> int:
        """The number of sequences."""
        arrays = (self.request_ids, self.all_input_ids, self.output_ids)
        return next(len(array) for array in arrays if array is not None)


@dataclass
class SamplingParam:
    """The sampling parameters of a batch, not yet checked.

    arrays: maps the names of arguments of ``SamplingMetadata.from_numpy`` to arrays.
    """

    arrays: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_numpy(
        cls,
        repetition_penalty: np.ndarray | None = None,
        frequency_penalty: np.ndarray | None = None,
        presence_penalty: np.ndarray | None = None,
        temperature: np.ndarray | None = None,
        top_k: np.ndarray | None = None,
        top_p: np.ndarray | None = None,
        seed: np.ndarray | None = None,
        do_sample: np.ndarray | None = None,
        to_tensor: Callable[[Any], Any] | None = None,
    ) -> "SamplingParam":
        """Return a SamplingParam. Each array is [sequences]. None means the default of the parameter."""
        return cls(
            {
                "repetition_penalty": repetition_penalty,
                "frequency_penalty": frequency_penalty,
                "presence_penalty": presence_penalty,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "seeds": seed,
                "do_sample": do_sample,
            }
        )
