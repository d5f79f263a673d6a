"""One tiny file of each family, and the model that it was written from, made once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlinfer import settings
from tests.framework.lmdeploy_ext.gguf import gguf_files


@dataclass(frozen=True)
class Written:
    """path: a GGUF file. model: transformers' model with the numbers in it."""

    path: Path
    model: Any


@pytest.fixture(scope="session", params=gguf_files.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def written(family: str, tmp_path_factory: pytest.TempPathFactory) -> Written:
    path = tmp_path_factory.mktemp("gguf") / f"{family}.gguf"
    return Written(path, gguf_files.build(family, path, gguf_files.mixed))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    gguf_files.build("llama", path, gguf_files.mixed)
    return path


@pytest.fixture
def cache(tmp_path: Path):
    """A cache folder of the test's own."""
    with settings.override(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"
