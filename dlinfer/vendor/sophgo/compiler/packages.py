"""Packages that compiling needs, which dlinfer's extra ``sophgo`` brings."""

from collections.abc import Sequence
from importlib import util

ONNX = ("onnx", "onnx_ir", "onnxscript")
"""Those that write ONNX."""

LLM = (*ONNX, "transformers")
"""Those that a model's folder needs too."""

ADVICE = "pip install 'dlinfer[sophgo]' has them"


def missing(needed: Sequence[str]) -> str:
    """Return the names of those that are not installed, with commas between; nothing where all are."""
    return ", ".join(name for name in needed if util.find_spec(name) is None)
