"""Errors between a good model and a running engine: the device type, and what the engine's own process meets."""

import sys
from pathlib import Path

import pytest

from tests.serve.api_server import ApiServer
from tests.serve.processes import LMDEPLOY, ProcessTree

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

UNKNOWN_DEVICE = """
from lmdeploy import PytorchEngineConfig
PytorchEngineConfig(device_type="abacus")
"""


def test_unknown_device_type_names_the_available_ones():
    """LMDeploy 0.18 itself: ``AssertionError: invalid device_type: abacus`` (messages.py:622)."""
    with ProcessTree([sys.executable, "-c", UNKNOWN_DEVICE]) as child:
        assert child.wait(500) == 1
        assert child.last_line().startswith(
            "dlinfer.errors.UnknownVendorError: unknown vendor or device_type 'abacus'. Available: cpu, cuda"
        )


@pytest.mark.full
def test_unknown_device_on_the_command_line_names_the_available_ones():
    command = [LMDEPLOY, "serve", "api_server", "/nowhere", "--backend", "pytorch", "--device", "abacus"]
    with ProcessTree(command) as child:
        assert child.wait(500) == 2
        assert "invalid choice: 'abacus'" in child.last_line()
        assert "cpu" in child.last_line()


@pytest.mark.full
def test_server_shows_the_error_of_its_engine_process(model: Path):
    """LMDeploy 0.18 itself ends with ``RPCServerDeadError: PyTorch ZMQ engine process is not alive``."""
    with ApiServer(model, "--num-gpu-blocks", str(10**9)) as server:
        assert server.wait(500) == 1, server.output()[-3000:]
        assert server.last_line().startswith("lmdeploy: error: the KV cache does not fit"), server.last_line()
        assert server.survivors() == []


@pytest.mark.full
def test_server_tells_when_its_engine_process_is_killed(model: Path):
    with ApiServer(model) as server:
        server.engine_process().kill()
        assert server.wait(500) == 1, server.output()[-3000:]
        assert server.last_line().startswith(
            "lmdeploy: error: the engine process of LMDeploy ended while it was starting: it was killed by SIGKILL"
        )
        assert server.survivors() == []
