"""The inputs and outputs of a model: their shapes and types, checks of input arrays, and random inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlinfer.vendor.qaic.errors import QaicInputError


@dataclass(frozen=True)
class TensorInfo:
    """The shape and type of an input or output.

    shape: None if the model declares no shape. A size that is not a number is its symbol's name; None if it has no
        name.
    """

    shape: tuple[int | str | None, ...] | None
    dtype: np.dtype[Any]

    @property
    def is_open(self) -> bool:
        """Whether arrays of different shapes are allowed here."""
        return self.shape is None or not all(isinstance(size, int) for size in self.shape)


def sizes_of(shape: Sequence[Any]) -> tuple[int | str | None, ...]:
    """Return each size as a number, as its symbol's name, or as None if it has no name.

    -1 and a text without a letter, such as "?", are sizes without a name.
    """
    return tuple(_size(size) for size in shape)


def _size(size: Any) -> int | str | None:
    if isinstance(size, str):
        return size if any(map(str.isalpha, size)) else None
    return None if size is None or size < 0 else int(size)


class ShapeDict(dict[str, tuple[tuple[int | str | None, ...] | None, np.dtype[Any]]]):
    """A dict from name to shape and type. A call of the dict returns the dict itself.

    So both of Qualcomm's forms work: the user guide calls ``session.model_input_shape_dict()``, and the samples read
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
    """Raise QaicInputError unless ``inputs`` has an array of the right shape and type for every input in ``infos``.

    defaults: inputs that the caller may leave out, because the model has values for them.
    No array is converted: a wrong type is the caller's mistake, which a silent copy would hide.
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
    """Return a random array for each input. Sizes that are not numbers become 1.

    Floats are normally distributed. Integers are 0 or 1, which are valid in embeddings and masks. Raises QaicInputError
    for an input without a declared shape.
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
    """Return the first size of the first input; 1 if this input is a scalar or if there are no inputs."""
    first = next(iter(inputs.values()), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1
