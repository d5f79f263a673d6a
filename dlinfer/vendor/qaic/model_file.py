"""The file that a Session opens: an ONNX model, or a QPC, which is a compiled model."""

import contextlib
import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlinfer.vendor.qaic.errors import QaicModelError, QaicOptionError

QPC_NAME = "programqpc.bin"  # the compiler's file in its folder


@dataclass(frozen=True)
class ModelFile:
    """An existing file.

    kind: ``onnx`` for a model to compile, ``qpc`` for a compiled model (Qualcomm program container).
    """

    path: Path
    kind: Literal["onnx", "qpc"]


def locate(model_path: Any) -> ModelFile:
    """Return the file that ``model_path`` means.

    model_path: an .onnx or .bin file, a pattern that matches one file (``model_qpc/*.bin``), or a folder with a QPC.
    The result's path is absolute. Raises QaicModelError if there is no such file, or if a pattern matches several.
    """
    if not isinstance(model_path, (str, Path)) or not str(model_path):
        raise QaicModelError(
            path=model_path, detail="it is not a path", advice="pass the path as a str or a Path"
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
    # Absolute, as the working directory may change. Links stay, since external weights are beside them.
    return ModelFile(path.absolute(), "onnx" if kind == "onnx" else "qpc")


@dataclass(frozen=True)
class GraphFacts:
    """Facts about an .onnx model, which can be read without its weights.

    symbols: the names of symbolic input sizes. of_any_rank: the names of inputs and outputs without a declared shape.
    weights_beside: whether weights are in external files.
    """

    symbols: frozenset[str]
    of_any_rank: frozenset[str]
    weights_beside: bool


def facts_of(model: ModelFile) -> GraphFacts | None:
    """Return facts about a model; None if onnx is not installed or cannot read the file.

    An unreadable file is no error here, because the compiler will refuse it.
    """
    try:
        import onnx
    except ImportError:
        return None
    graph = None
    with contextlib.suppress(Exception):  # onnx does not rename protobuf's errors
        graph = onnx.load(str(model.path), load_external_data=False).graph
    if graph is None:
        return None
    kinds = {value.name: value.type.tensor_type for value in (*graph.input, *graph.output)}
    inputs = [kinds[value.name] for value in graph.input]
    return GraphFacts(
        frozenset(dim.dim_param for kind in inputs for dim in kind.shape.dim if dim.dim_param),
        frozenset(name for name, kind in kinds.items() if not kind.HasField("shape")),
        any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in graph.initializer),
    )


def check_symbols(model: ModelFile, options: Mapping[str, Any]) -> None:
    """Raise QaicOptionError if ``onnx_define_symbol`` has a name that is not a symbolic input size of the model."""
    defined = options.get("onnx_define_symbol")
    facts = facts_of(model) if defined else None
    if facts is None:
        return
    unknown = sorted(set(defined or ()) - facts.symbols)
    if unknown:
        names = ", ".join(sorted(facts.symbols)) or "none"
        expected = f"symbols of the model's inputs ({names}); {unknown[0]!r} is not one of them"
        raise QaicOptionError(option="onnx_define_symbol", given=defined, expected=expected)


def _only_match(pattern: str) -> Path:
    files = sorted(glob.glob(pattern))
    if len(files) != 1:
        detail = f"the pattern matches {len(files)} files" + (f": {', '.join(files[:5])}" if files else "")
        raise QaicModelError(
            path=pattern, detail=detail, advice="pass a pattern that matches one file, or the file's path"
        )
    return Path(files[0])


def _in_folder(folder: Path) -> Path:
    if (folder / QPC_NAME).is_file():
        return folder / QPC_NAME
    raise QaicModelError(
        path=str(folder),
        detail=f"the folder contains no {QPC_NAME}",
        advice="pass the model's .onnx or its QPC",
    )
