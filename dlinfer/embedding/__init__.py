"""Embedding models and rerankers: texts to vectors, and pairs of texts to scores.

``load(folder)`` reads a folder as sentence-transformers or transformers saves it. ``dlinfer serve`` and
``python -m dlinfer.embedding.server`` serve one over HTTP.
"""

from typing import TYPE_CHECKING, Any

from dlinfer.embedding.errors import EmbeddingFolderError, EmbeddingInputError, EmbeddingQueueError

if TYPE_CHECKING:
    from dlinfer.embedding.text_model import TextModel, load

__all__ = [
    "EmbeddingFolderError", "EmbeddingInputError", "EmbeddingQueueError", "TextModel", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("TextModel", "load"):  # they import torch, which the command line does not need
        from dlinfer.embedding import text_model

        return getattr(text_model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
