"""Inputs and outputs of a model: their shapes and types, checks of arrays, and random arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlinfer.vendor.qaic.errors import QaicInputError


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of an input or output. A size that is not a number is its symbol's name, or None without a name.

    shape: None if the model does not say how many dimensions there are.
    """

    shape: tuple[int | str | None, ...] | None
    dtype: np.dtype[Any]

    @property
    def is_open(self) -> bool:
        """Whether arrays of different shapes are allowed."""
        return self.shape is None or not all(isinstance(size, int) for size in self.shape)


def sizes_of(shape: Sequence[Any]) -> tuple[int | str | None, ...]:
    """Return sizes as numbers, names of symbols, or None. -1 and text without a letter, such as "?", name no symbol."""
    return tuple(_size(size) for size in shape)


def _size(size: Any) -> int | str | None:
    if isinstance(size, str):
        return size if any(map(str.isalpha, size)) else None
    return None if size is None or size < 0 else int(size)


class ShapeDict(dict[str, tuple[tuple[int | str | None, ...] | None, np.dtype[Any]]]):
    """Maps a name to a shape and a type. It can be used as a dict and as a method that returns it.

    Qualcomm's user guide calls ``session.model_input_shape_dict()``, its samples read
    ``session.model_input_shape_dict["data"]``.
    """

    def __call__(self) -> "ShapeDict":
        return self

    @classmethod
    def of(cls, infos: Mapping[str, TensorInfo]) -> "ShapeDict":
        """Return the shapes and types in ``infos`` by name."""
        return cls({name: (info.shape, info.dtype) for name, info in infos.items()})


def check_inputs(
    inputs: Any, infos: Mapping[str, TensorInfo], defaults: Mapping[str, TensorInfo] | None = None
) -> None:
    """Raise QaicInputError unless ``inputs`` has a numpy array of the right shape and type for every input.

    defaults: inputs that may be left out, because the model has values for them.
    Nothing is converted: a wrong type is the caller's mistake, not a reason for a silent copy.
    """
    if not isinstance(inputs, Mapping):
        raise QaicInputError(
            name="input_dict", expected="a dict of name to array", given=type(inputs).__name__
        )
    known = {**infos, **(defaults or {})}
    if not infos.keys() <= inputs.keys() <= known.keys():
        expected = f"the inputs {sorted(infos)}"
        if defaults:
            expected += f", and optionally any of {sorted(defaults)}"
        raise QaicInputError(name="input_dict", expected=expected, given=sorted(map(str, inputs)))
    sizes: dict[str, int] = {}
    for name, array in inputs.items():
        info = known[name]
        if not isinstance(array, np.ndarray):
            raise QaicInputError(name=name, expected="a numpy array", given=f"a {type(array).__name__}")
        if info.shape is None and array.dtype == info.dtype:
            continue
        if info.shape is None or array.dtype != info.dtype or array.ndim != len(info.shape):
            raise QaicInputError(name=name, expected=_text(info), given=f"{array.dtype} {array.shape}")
        for size, expected_size in zip(array.shape, info.shape, strict=True):
            named = isinstance(expected_size, str)
            fixed = sizes.setdefault(expected_size, size) if named else expected_size
            if fixed is not None and size != fixed:
                given_text = f"{array.dtype} {array.shape}"
                raise QaicInputError(name=name, expected=_text(info, sizes), given=given_text)


def _text(info: TensorInfo, sizes: Mapping[str, int] | None = None) -> str:
    if info.shape is None:
        return f"{info.dtype} of any shape"
    text = f"{info.dtype} [{', '.join('?' if size is None else str(size) for size in info.shape)}]"
    known = {name: size for name, size in (sizes or {}).items() if name in info.shape}
    return text + (f" with {known}" if known else "")


def random_inputs(infos: Mapping[str, TensorInfo]) -> dict[str, np.ndarray]:
    """Return random arrays for all inputs; sizes that are not numbers are 1. Raises QaicInputError for an unknown rank.

    Floats are normally distributed. Integers are 0 or 1, which are valid for embeddings and masks.
    """
    generator = np.random.default_rng()
    arrays: dict[str, np.ndarray] = {}
    for name, info in infos.items():
        if info.shape is None:
            expected = (
                f"{_text(info)}: the model does not declare the shape, so pass run_benchmark(input_dict=...)"
            )
            raise QaicInputError(name=name, expected=expected, given="nothing")
        shape = tuple(size if isinstance(size, int) else 1 for size in info.shape)
        if np.issubdtype(info.dtype, np.floating):
            arrays[name] = generator.standard_normal(shape).astype(info.dtype)
        else:
            arrays[name] = generator.integers(0, 2, shape).astype(info.dtype)
    return arrays


def batch_size(inputs: Mapping[str, np.ndarray]) -> int:
    """Return the first size of the first input; 1 if the input is a scalar or if there are no inputs."""
    first = next(iter(inputs.values()), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1
