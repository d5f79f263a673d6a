"""The replacements of ``serving`` that need no server: what each would do with LMDeploy's original at hand."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.errors import ending
from dlinfer.framework.lmdeploy_ext.faults.serving import health_monitor
from tests.serve.processes import ProcessTree

UNSENT_MESSAGE = """
import sys
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.engine.mp_engine.zmq_rpc import AsyncRPCClient
PytorchEngineConfig(device_type="cpu")
client = AsyncRPCClient(port=1)  # nobody listens there
client.sync_socket.send(b"to a dead engine")
client.close_sockets()
print("closed")
"""


@pytest.mark.slow
def test_sockets_close_with_an_unsent_message():
    """LMDeploy 0.18 itself waits for ever in ``Context.term``: zmq's default is to linger without end."""
    with ProcessTree([sys.executable, "-c", UNSENT_MESSAGE]) as child:
        assert child.wait(500) == 0, child.output()
        assert child.last_line() == "closed"


def test_health_monitor_stops_when_its_first_cancellation_is_swallowed(monkeypatch: pytest.MonkeyPatch):
    """What asyncio.wait_for does before Python 3.12 when the cancellation meets the end of a probe (bpo-37658)."""
    monkeypatch.setattr(activation, "_active", "cpu")

    async def probe_for_ever() -> None:
        swallowed = False
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if swallowed:
                    raise
                swallowed = True

    async def original(self: object) -> None:
        raise AssertionError("left to the original")

    async def start_and_stop() -> object:
        monitor = SimpleNamespace(_task=asyncio.create_task(probe_for_ever()))
        await asyncio.sleep(0)
        await asyncio.wait_for(health_monitor._stop_health_monitor.build(original)(monitor), timeout=300)
        return monitor._task

    assert asyncio.run(start_and_stop()) is None


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (-9, "killed by SIGKILL (as the system does when memory runs out)"),
        (-11, "SIGSEGV"),
        (3, "status was 3"),
    ],
)
def test_a_death_without_a_word_is_described_by_its_exit_status(exitcode: int, words: str):
    assert words in ending(exitcode)
