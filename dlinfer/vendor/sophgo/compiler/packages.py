"""Packages for compiling, which dlinfer's extra ``sophgo`` installs."""

from collections.abc import Sequence
from importlib import util

ONNX = ("onnx", "onnx_ir", "onnxscript")
"""Packages that write ONNX."""

LLM = (*ONNX, "transformers")
"""Packages that read a Hugging Face model folder and write ONNX."""

ADVICE = "install them with: pip install 'dlinfer[sophgo]'"


def missing(needed: Sequence[str]) -> str:
    """Return the names of the packages that are not installed, with commas between them; "" if none is missing."""
    return ", ".join(name for name in needed if util.find_spec(name) is None)
