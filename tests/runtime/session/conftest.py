"""Sessions of one artifact, of which an engine that compiles nothing runs the nodes."""

import pytest

import dlinfer
from tests.runtime.artifact.artifact_files import compiled_head, saved, use_stub


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    return use_stub(monkeypatch)


@pytest.fixture
def path(tmp_path):
    return saved(compiled_head()[1], tmp_path / "head.dlinfer")


@pytest.fixture
def session(path):
    with dlinfer.load(path) as session:
        yield session


@pytest.fixture
def owned(path):
    with dlinfer.load(path, options={"io": "owned"}) as session:
        yield session
