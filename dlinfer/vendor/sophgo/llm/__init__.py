"""Language models as bmodels: ``compile_folder`` compiles a Hugging Face folder, and ``Generator`` runs the bmodel.

The nets have the names of Sophgo's own LLM demos: ``embedding``, ``block_i``, ``block_cache_i`` and ``lm_head``."""

import importlib
from typing import Any

__all__ = ["Generator", "LlmOptions", "compile_folder", "generate"]  # pyright: ignore[reportUnsupportedDunderAll]

_HOMES = {
    "Generator": "generating",
    "LlmOptions": "build",
    "compile_folder": "build",
    "generate": "generating",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
