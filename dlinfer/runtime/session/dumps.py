"""Inputs and outputs of runs on disk, as text for people and as .npy files for programs."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class Dumps:
    """Writes runs while ``text`` or ``folder`` is set; numbered from 0, in the order in which they end."""

    def __init__(self) -> None:
        self.text: Path | None = None
        self.folder: Path | None = None
        self._lock = threading.Lock()
        self._number = 0

    def write(self, entry: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Write one run where it is wanted. Raises OSError where a file cannot be written."""
        if self.text is None and self.folder is None:
            return
        values = [("input", *item) for item in inputs.items()] + [
            ("output", *item) for item in outputs.items()
        ]
        with self._lock:
            number, self._number = self._number, self._number + 1
            if self.text is not None:
                self.text.parent.mkdir(parents=True, exist_ok=True)
                with open(self.text, "a") as stream:
                    stream.write(f"run {number} of {entry}\n")
                    stream.writelines(_lines(*value) for value in values)
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                for kind, name, value in values:
                    _save(self.folder / f"{number:06d}_{entry}_{kind}_{name}", value)


def _lines(kind: str, name: str, value: Any) -> str:
    import numpy

    array, dtype = _array(value)
    text = numpy.array2string(array, threshold=2**62, max_line_width=120, floatmode="unique")
    return f"{kind} {name}: {dtype} {list(array.shape)}\n{text}\n"


def _save(path: Path, value: Any) -> None:
    import numpy

    array, dtype = _array(value)
    # numpy has no bfloat16: its name goes into the file's, and its values, which float32 holds, into the file.
    suffix = ".npy" if dtype == str(array.dtype) else f".{dtype}.npy"
    with open(path.with_name(path.name + suffix), "wb") as stream:
        numpy.save(stream, array, allow_pickle=False)


def _array(value: Any) -> tuple[Any, str]:
    """A value as an array that numpy can write, and the name of its own dtype."""
    import numpy

    if not isinstance(value, torch.Tensor):
        array = numpy.asarray(value)
        return array, str(array.dtype)
    tensor = value.detach().cpu()
    dtype = str(value.dtype).removeprefix("torch.")
    try:
        return tensor.numpy(), dtype
    except TypeError:
        return tensor.float().numpy(), dtype
