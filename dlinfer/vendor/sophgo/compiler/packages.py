"""The packages that compiling needs. dlinfer's extra ``sophgo`` installs them."""

from collections.abc import Sequence
from importlib import util

ONNX = ("onnx", "onnx_ir", "onnxscript")
"""The packages that write ONNX."""

LLM = (*ONNX, "transformers")
"""The packages that read a Hugging Face model folder and write ONNX."""

ADVICE = "install them with: pip install 'dlinfer[sophgo]'"


def missing(needed: Sequence[str]) -> str:
    """Return the packages of ``needed`` that are not installed, separated by commas; "" if all are installed."""
    return ", ".join(name for name in needed if util.find_spec(name) is None)
