"""The sampling parameters and their allowed values. Names, order and limits are MindIE's."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dlinfer.framework.mindie_ext.errors import SamplingError

SAMPLING_DTYPE = [
    ("repetition_penalty", "f4"),
    ("frequency_penalty", "f4"),
    ("presence_penalty", "f4"),
    ("temperature", "f4"),
    ("top_k", "f4"),
    ("top_p", "f4"),
    ("do_sample", "f4"),
    ("top_logprobs", "f4"),
]
"""The fields of a sampling record: a numpy record that holds the sampling parameters of one sequence."""

DEFAULT_SAMPLING_PARAMS: dict[str, float] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "do_sample": False,
    "top_logprobs": 0,
}

MOST_LOGPROBS = 20
LARGEST_SEED = 2**63 - 1

# Parameter -> (the allowed values as a text, a function that checks values).
_RULES: dict[str, tuple[str, Callable[[np.ndarray], Any]]] = {
    "repetition_penalty": ("more than 0", lambda x: x > 0),
    "frequency_penalty": ("a number", np.isfinite),
    "presence_penalty": ("a number", np.isfinite),
    "temperature": ("0 or more; 0 is greedy", lambda x: x >= 0),
    "top_k": ("0 or more; 0 is off", lambda x: x >= 0),
    "top_p": ("from 0 to 1; 1 is off", lambda x: (x >= 0) & (x <= 1)),
    "top_logprobs": (f"from 0 to {MOST_LOGPROBS}", lambda x: (x >= 0) & (x <= MOST_LOGPROBS)),
    "seeds": (f"from 0 to {LARGEST_SEED}", lambda x: x >= 0),
}


def checked(name: str, values: np.ndarray | None, count: int) -> np.ndarray | None:
    """Check the values of the parameter ``name`` and return a copy. None stays None. Raises SamplingError.

    values: [count], one value for each sequence.
    """
    if values is None:
        return None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iufb":
        actual = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise SamplingError(parameter=name, expected=f"a numpy array [{count}] of numbers", given=actual)
    if len(values) != count:
        raise SamplingError(
            parameter=name, expected=f"{count} values, one for each sequence", given=len(values)
        )
    if name in _RULES:
        expected, holds = _RULES[name]
        right = holds(values) & (np.isfinite(values) if values.dtype.kind == "f" else True)
        if not np.all(right):
            wrong = values[~np.broadcast_to(right, values.shape)][0]
            raise SamplingError(parameter=name, expected=expected, given=wrong)
    return values.copy()
