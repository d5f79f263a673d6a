"""Signals stop and kill the replicas, whatever becomes of the command's output."""

import asyncio
from typing import Any

import pytest

from dlinfer.serve import supervisor as module
from dlinfer.serve.options import ServerOptions
from dlinfer.serve.placement import Placement
from dlinfer.serve.supervisor import Supervisor


class Stopped:
    """Takes the place of a replica, and lists its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_stop = asyncio.Event()

    async def stop(self) -> None:
        self.calls.append("stop")
        await self.may_stop.wait()

    def kill(self) -> None:
        self.calls.append("kill")
        self.may_stop.set()


def test_the_first_signal_stops_and_the_second_kills(monkeypatch: pytest.MonkeyPatch):
    """A print that fails comes too late to prevent either."""

    def fail(line: str) -> None:
        raise BrokenPipeError(line)

    monkeypatch.setattr(module, "say", fail)

    async def main() -> list[list[str]]:
        placements = [Placement((0,), 1)] * 2
        supervisor: Any = Supervisor("model", ServerOptions("127.0.0.1", 1, ()), placements)
        supervisor._replicas = [Stopped(), Stopped()]
        supervisor._ended = asyncio.get_running_loop().create_future()
        with pytest.raises(BrokenPipeError):
            supervisor._stop()
        await asyncio.sleep(0.01)
        assert not supervisor._ended.done()
        supervisor._stop()
        await asyncio.wait_for(supervisor._ended, 60)
        return [replica.calls for replica in supervisor._replicas]

    assert asyncio.run(main()) == [["stop", "kill"]] * 2
