"""LMDeploy's command line on the CPU: the server's life, its answers, and the chat in a terminal."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Lab
from tests.serve.api_server import ENDED_BY_SIGTERM, ApiServer


@pytest.fixture(scope="session")
def model(lab: Lab) -> Path:
    """A tiny checkpoint."""
    return lab.model("llama")


@pytest.fixture(scope="package")
def server(model: Path) -> Iterator[ApiServer]:
    """One server for all that it is asked. Its stop is part of the tests: whatever it was sent, it ends and leaves
    nothing."""
    with ApiServer(model, "--logprobs-mode", "raw_logprobs", "--eager-mode") as server:
        server.ready()
        yield server
        ending = server.stop()
        assert ending.status == ENDED_BY_SIGTERM, server.output()[-4000:]
        assert not ending.survivors
