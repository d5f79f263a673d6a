"""LMDeploy's command line on the CPU: the server's life, its answers, and the chat in a terminal."""

from pathlib import Path

import pytest

from tests.e2e.harness import Lab


@pytest.fixture(scope="session")
def model(pytestconfig: pytest.Config) -> Path:
    """A tiny checkpoint, kept between runs in pytest's cache folder."""
    return Lab(pytestconfig.cache.mkdir("e2e")).model("llama")
