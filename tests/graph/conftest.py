"""What tests of graph mode share."""

import pytest
import torch

from dlinfer import settings
from dlinfer.graph.report import report
from dlinfer.ops.core import fallback
from tests.caches import fresh_cache


@pytest.fixture(scope="session")
def artifact_folder(tmp_path_factory: pytest.TempPathFactory):
    """One folder of compiled artifacts for all tests of a session, so that equal clusters compile once."""
    return fresh_cache(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture
def graph_mode(artifact_folder):
    """Nothing compiled before is seen, by Dynamo or in the reports; no fallback was counted."""
    torch._dynamo.reset()
    report.reset()
    fallback.reset()
    with settings.override(cache_dir=str(artifact_folder), fallback="allow"):
        yield
    torch._dynamo.reset()
