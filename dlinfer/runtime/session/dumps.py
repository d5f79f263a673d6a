"""Write inputs and outputs of runs to disk: as text for people, and as .npy files for programs."""

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch

from dlinfer.runtime.session.arrays import Array


class Dumps:
    """Writes each run to the file ``text`` and the folder ``folder``, if they are set.

    Runs are numbered as they end, from 0.
    """

    def __init__(self) -> None:
        self.text: Path | None = None
        self.folder: Path | None = None
        self._lock = threading.Lock()
        self._number = 0

    def write(self, entry: str, inputs: Mapping[str, object], outputs: Mapping[str, object]) -> None:
        if self.text is None and self.folder is None:
            return
        kinds = {"input": inputs, "output": outputs}
        values = [
            (kind, name, *_array(value)) for kind, named in kinds.items() for name, value in named.items()
        ]
        with self._lock:
            number, self._number = self._number, self._number + 1
            if self.text is not None:
                self.text.parent.mkdir(parents=True, exist_ok=True)
                with open(self.text, "a") as stream:
                    stream.write(f"run {number} of {entry}\n")
                    for kind, name, array, dtype in values:
                        text = numpy.array2string(
                            array, threshold=2**62, max_line_width=120, floatmode="unique"
                        )
                        stream.write(f"{kind} {name}: {dtype} {list(array.shape)}\n{text}\n")
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                for kind, name, array, dtype in values:
                    # numpy has no bfloat16: the file holds float32 values, and its name holds the original dtype.
                    suffix = ".npy" if dtype == str(array.dtype) else f".{dtype}.npy"
                    with open(self.folder / f"{number:06d}_{entry}_{kind}_{name}{suffix}", "wb") as stream:
                        numpy.save(stream, array, allow_pickle=False)


def _array(value: object) -> tuple[Array, str]:
    """Return a value as an array that numpy can write, and the name of the dtype that the value had before."""
    if not isinstance(value, torch.Tensor):
        array = numpy.asarray(value)
        return array, str(array.dtype)
    tensor = value.detach().cpu()
    dtype = str(value.dtype).removeprefix("torch.")
    try:
        return tensor.numpy(), dtype
    except TypeError:
        return tensor.float().numpy(), dtype
