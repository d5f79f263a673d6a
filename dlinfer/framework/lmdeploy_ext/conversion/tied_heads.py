"""Decides by transformers' rule whether the output projection is tied to the embedding.

transformers ties the two if ``tie_word_embeddings`` is true. But if the files hold a separate output projection with
other values, transformers uses both tensors and warns. LMDeploy ignores a stored output projection whenever
``tie_word_embeddings`` is true.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import language_configs

logger = logging.getLogger("dlinfer")

_HEADS = ("lm_head.weight", "output_layer.weight", "output.weight")
_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "word_embeddings.weight")
_ROWS = 1 << 12


def settle(hf_config: Any, folder: Path | None) -> None:
    """Set ``tie_word_embeddings`` to false if the stored output projection differs from the embedding.

    hf_config: transformers' configuration, changed in place. folder: the model folder; None leaves ``hf_config`` as it
    is.
    """
    tying = [part for part in language_configs(hf_config) if getattr(part, "tie_word_embeddings", False)]
    if not tying or folder is None or not folder.is_dir():
        return
    files = dict(_tables(folder))
    heads = [name for name in files if name.endswith(_HEADS)]
    embeddings = [name for name in files if name.endswith(_EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1:
        return
    head, embedding = (model_files.tensor(files[name], name) for name in (*heads, *embeddings))
    rows = zip(head.split(_ROWS), embedding.split(_ROWS), strict=True)
    if head.shape == embedding.shape and all(bool((a == b).all()) for a, b in rows):
        return
    for part in tying:
        part.tie_word_embeddings = False
    logger.warning(
        "tie_word_embeddings is true, but %s has %s and %s, which differ: both are used, as in transformers",
        folder,
        *heads,
        *embeddings,
    )


def _tables(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in model_files.weight_files(folder):
        for name, _ in model_files.empty_tensors(path):
            if name.endswith((*_HEADS, *_EMBEDDINGS)):
                yield name, path
