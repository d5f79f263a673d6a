"""dlinfer puts any accelerator under LLM serving.

Importing the package loads no vendor SDK and no framework, compiles nothing and patches nothing. Each public part is
loaded when it is first used:

- ``dlinfer.ops``: the fused ops. A call runs on the active vendor of its tensors' device.
- ``dlinfer.vendor``: the installed vendors, and the active one.
- ``dlinfer.settings``: every ``DLINFER_*`` variable, in one documented place.
- ``dlinfer.errors``: every error that a user can meet.
- ``dlinfer.compile(module, args)``: compiles ahead of time, with the passes of ``torch.compile(backend="dlinfer")``.
- ``dlinfer.transformers.optimize(model)``: makes the modules of a Hugging Face model run on the fused ops.
- ``dlinfer.embedding.load(folder)``: an embedding model or a reranker, for texts and pairs of texts.
- ``dlinfer.explain(model, *args)``: describes how graph mode compiled a model, as text, JSON or a page.
- ``dlinfer.refresh(model)``: makes compiled graphs read weights again after writes that torch does not track.
"""

import importlib
import time
from typing import Any

__version__ = "0.4.0"
LOADED_AT = time.time_ns()  # no module of the package was loaded before: see graph/cache/sources.py

__all__ = [
    "__version__", "bundle", "compile", "embedding", "errors", "explain", "load", "ops", "refresh", "settings",
    "transformers", "vendor",  # pyright: ignore[reportUnsupportedDunderAll]
]  # fmt: skip


# Function of the package -> the module that defines it. All other public names are modules.
_FUNCTIONS = {
    "bundle": "dlinfer.runtime.artifact.artifact",
    "compile": "dlinfer.runtime.aot",
    "explain": "dlinfer.explanation.explanation",
    "load": "dlinfer.runtime.session.session",
    "refresh": "dlinfer.graph.engine_kit.held_weights",
}
_MODULES = {"transformers": "dlinfer.framework.transformers_ext"}
"""Public name of this package -> the module that the name stands for."""


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name in __all__:
        return importlib.import_module(_MODULES.get(name, f"{__name__}.{name}"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
