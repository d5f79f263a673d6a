"""A replica restarts a stuck server, kills it for good, and drops output that nobody reads."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dlinfer.serve import addresses, replica
from dlinfer.serve.replica import Replica

SECONDS = 60

# A server with /health. The second word of its command line says how it takes SIGTERM.
SERVER = """
import os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

_, port, kind = sys.argv
answers = 0

class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self):
        global answers
        answers += 1
        self.send_response(503 if kind == "was stuck" and answers > 1 else self.status)
        self.end_headers()

    def log_message(self, *_):
        pass

def end(*_):
    if kind == "is stuck":
        Health.status = 503
        return
    server.server_close()
    time.sleep(2 if kind == "finishes" else 600)
    os._exit(0)

signal.signal(signal.SIGTERM, end)
server = HTTPServer(("127.0.0.1", int(port)), Health)
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "_WATCH_SECONDS", 0.1)
    monkeypatch.setattr(replica, "_STUCK_SECONDS", 1.0)
    monkeypatch.setattr(replica, "_POLL_SECONDS", 0.05)


def replica_of(program: str, *words: str) -> Replica:
    ((host, port),) = addresses.free("127.0.0.1", 1)
    command = [sys.executable, "-c", program, str(port), *words]
    return Replica(0, command, (host, port), None, lambda: None)


def server(kind: str) -> Replica:
    return replica_of(SERVER, kind)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, SECONDS))


async def until(happened: Callable[[], bool]) -> None:
    while not happened():
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("is stuck", -9),  # keeps its port, and is never healthy again
        ("was stuck", -9),  # is not healthy when it is told to end, and then closes its port
        ("finishes", 0),  # closes its port, and takes longer for its requests than a stuck server may
    ],
)
def test_a_restart(kind: str, status: int):
    async def main() -> None:
        served = server(kind)
        running = asyncio.create_task(served.run(lambda: False))
        await until(lambda: served.ready)
        first = served._process
        assert first is not None
        await asyncio.sleep(0.5)
        await served.restart(0)
        assert served.ready
        assert (first.returncode, served.restarts) == (status, 0)
        served.kill()
        await running

    run(main())


def test_a_killed_replica_does_not_come_back():
    async def main() -> None:
        served = server("finishes")
        running = asyncio.create_task(served.run(lambda: False))
        await until(lambda: served.ready)
        served.kill()
        await running
        assert (served.state, served.restarts) == ("stopped", 0)

    run(main())


def test_a_server_that_prints_goes_on_though_nobody_reads(monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)

    async def main() -> None:
        served = replica_of("for _ in range(5000): print('x' * 1000)")
        process = await served._start()
        assert await process.wait() == 0

    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        run(main())
        monkeypatch.undo()


def test_health():
    async def main() -> None:
        served = server("is stuck")
        assert await replica.health(served.url) is None
        process = await served._start()
        while await replica.health(served.url) is None:
            await asyncio.sleep(0.05)
        assert await replica.health(served.url) is True
        process.terminate()
        while await replica.health(served.url) is True:
            await asyncio.sleep(0.05)
        assert await replica.health(served.url) is False
        served.kill()
        await process.wait()

    run(main())
