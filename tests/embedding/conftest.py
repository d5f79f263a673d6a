"""Folders of tiny models, and a cache of compiled code, for all tests of a session."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlinfer import settings
from tests.caches import fresh_cache
from tests.embedding import tiny


@pytest.fixture(scope="session")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Code that one test has compiled is loaded by the next."""
    return fresh_cache(tmp_path_factory.mktemp("embedding-cache"))


@pytest.fixture(autouse=True)
def cached(compiled_code: Path) -> Iterator[None]:
    """Packed models have to be one graph, without a fallback."""
    with settings.override(cache_dir=str(compiled_code), fallback="error"):
        yield


Folder = Callable[..., Path]


def with_prompts(folder: Path) -> Path:
    prompts = {"prompts": {"query": "query: ", "document": "passage: "}, "default_prompt_name": "query"}
    return tiny.sentence_files(folder, "mean", max_seq_length=40, prompts=prompts)


@pytest.fixture
def folder_of(tmp_path: Path) -> Folder:
    """``folder_of(family, head, **config)`` writes a model with the same random weights at each call."""

    def build(family: str, head: str = "Model", **config: Any) -> Path:
        torch.manual_seed(len(family) + len(head))
        return tiny.build(tmp_path / f"{family}-{head}", family, head, **config)

    return build


@pytest.fixture
def embedding_folder(folder_of: Folder) -> Path:
    """A BERT that pools the mean, normalises, cuts at 40 tokens, and has prompts."""
    return with_prompts(folder_of("bert"))


@pytest.fixture
def reranker_folder(folder_of: Folder) -> Path:
    """A BERT with a head of one label."""
    return folder_of("bert", "ForSequenceClassification", num_labels=1)
