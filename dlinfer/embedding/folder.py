"""Tells from a folder's files whether it holds an embedding model, a reranker or a generating model.

This module imports only the standard library.
"""

import json
from pathlib import Path
from typing import Any, Literal, cast

from dlinfer.embedding.errors import EmbeddingFolderError

Task = Literal["embed", "rerank"]
TASKS: tuple[Task, ...] = ("embed", "rerank")

ENCODERS = frozenset(
    "albert bert camembert deberta deberta-v2 distilbert electra ernie eurobert gte jina_embeddings_v3 modernbert "
    "mpnet new nomic_bert roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl".split()
)
"""Values of ``model_type`` of models that generate no text."""


def read_json(path: Path) -> Any:
    """Return the JSON in a file; None if there is no such file. Raises EmbeddingFolderError for anything else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise EmbeddingFolderError(
            folder=path.parent, reason=f"{path.name}: {error}", advice="download the folder again."
        ) from error


def read_dict(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file."""
    data = {} if (read := read_json(path)) is None else read
    if not isinstance(data, dict):
        raise EmbeddingFolderError(
            folder=path.parent, reason=f"{path.name} is no JSON object", advice="download the folder again."
        )
    return cast(dict[str, Any], data)


def task_of(folder: Path) -> Task | None:
    """Return what a model folder is for. None: text generation, or no folder of a model.

    The modules of sentence-transformers decide first, then the architecture. A causal language model without such
    modules counts as a generating model, even if its name says otherwise.
    """
    config = read_dict(folder / "config.json")
    if modules := read_json(folder / "modules.json"):
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        if "Pooling" in kinds:
            return "embed"
        architecture = (config.get("architectures") or [""])[0]
        scores = "LogitScore" in kinds or architecture.endswith("ForSequenceClassification")
        return "rerank" if scores else "embed"
    architecture = (config.get("architectures") or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        return "rerank"
    return "embed" if config.get("model_type") in ENCODERS else None
