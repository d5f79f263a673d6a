"""What a Session is asked to open: an ONNX model, or a compiled QPC."""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlinfer.vendor.qaic.errors import QaicModelError

QPC_NAME = "programqpc.bin"  # what the compiler writes into its folder


@dataclass(frozen=True)
class ModelFile:
    """A file that exists. onnx: a model to compile. qpc: a compiled program container."""

    path: Path
    kind: Literal["onnx", "qpc"]


def locate(model_path: Any) -> ModelFile:
    """Return the file behind ``model_path``: an .onnx, a .bin, a pattern (``model_qpc/*.bin``) or a folder with a QPC.

    Raises QaicModelError where there is none, or more than one.
    """
    if not isinstance(model_path, (str, Path)) or not str(model_path):
        raise QaicModelError(
            path=model_path, detail="it is no path", advice="pass the path as a str or a Path"
        )
    path = Path(model_path)
    if not path.exists() and glob.has_magic(str(model_path)):
        path = _only_match(str(model_path))
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise QaicModelError(path=str(path), detail="there is no such file", advice="correct the path")
    kind = {".onnx": "onnx", ".bin": "qpc"}.get(path.suffix.lower())
    if kind is None:
        raise QaicModelError(
            path=str(path),
            detail=f"its ending {path.suffix!r} is neither .onnx (a model) nor .bin (a compiled QPC)",
            advice="export the model to ONNX, or pass the QPC that the compiler wrote",
        )
    return ModelFile(path, "onnx" if kind == "onnx" else "qpc")


def _only_match(pattern: str) -> Path:
    found = sorted(glob.glob(pattern))
    if len(found) != 1:
        detail = f"the pattern fits {len(found)} files" + (f": {', '.join(found[:5])}" if found else "")
        raise QaicModelError(
            path=pattern, detail=detail, advice="pass a pattern that fits one file, or its path"
        )
    return Path(found[0])


def _in_folder(folder: Path) -> Path:
    if (folder / QPC_NAME).is_file():
        return folder / QPC_NAME
    raise QaicModelError(
        path=str(folder), detail=f"the folder holds no {QPC_NAME}", advice="pass the model's .onnx or its QPC"
    )
