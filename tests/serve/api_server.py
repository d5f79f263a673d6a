"""``lmdeploy serve api_server`` on the CPU, as a user starts it, on a free port."""

import contextlib
import http.client
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil

from tests.serve.processes import LMDEPLOY, ProcessTree

MODEL_NAME = "tiny"

# Of a machine that does much else besides; a server that is well needs a tenth.
START_SECONDS = 400
STOP_SECONDS = 300
REQUEST_SECONDS = 300

# uvicorn raises the signal again once it has shut down, so that a caller sees what ended the server.
ENDED_BY_SIGTERM = -signal.SIGTERM


@dataclass(frozen=True)
class Ending:
    """How a server ended: exit status, seconds from signal to end, and what it left running."""

    status: int
    seconds: float
    survivors: list[str]


class ApiServer(ProcessTree):
    """A server; ``ready`` waits until it answers.

    environment: more of its variables. It has one thread (OMP_NUM_THREADS) unless they say otherwise.
    """

    def __init__(
        self, model: Path, *options: str, session_len: int = 1024, port: int | None = None, **environment: str
    ) -> None:
        self._held = socket.socket() if port else held_port()
        self.port = port or self._held.getsockname()[1]
        command = [LMDEPLOY, "serve", "api_server", str(model), "--backend", "pytorch", "--device", "cpu"]
        command += ["--model-name", MODEL_NAME, "--server-name", "127.0.0.1", "--server-port", str(self.port)]
        command += ["--session-len", str(session_len), "--max-batch-size", "8"]
        super().__init__([*command, *options], **environment)

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self._held.close()

    def ready(self) -> float:
        """Wait until the server answers; seconds since its start. Raises AssertionError when it ends or hangs."""
        while self.process.poll() is None and time.monotonic() < self.started + START_SECONDS:
            if self.answers():
                return time.monotonic() - self.started
            time.sleep(0.1)
        raise AssertionError(
            f"no answer; exit status {self.process.poll()}, output:\n{self.output()[-6000:]}"
        )

    def engine_process(self) -> psutil.Process:
        """The process that runs the engine, as soon as it exists: some seconds before the server answers."""
        while self.process.poll() is None and time.monotonic() < self.started + START_SECONDS:
            for process in self.alive():
                with contextlib.suppress(psutil.Error):
                    if any("spawn_main" in argument for argument in process.cmdline()):
                        return process
            time.sleep(0.05)
        raise AssertionError(f"no engine process; output:\n{self.output()[-6000:]}")

    def answers(self) -> bool:
        try:
            return self.request("GET", "/v1/models")[0] == 200
        except (OSError, http.client.HTTPException):  # nobody listens, or the server ends as it answers
            return False

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        """Status and body of one plain HTTP request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        try:
            # The second header is asked for by the endpoints of Anthropic's protocol.
            headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def client(self) -> openai.OpenAI:
        base_url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(api_key="none", base_url=base_url, max_retries=0, timeout=REQUEST_SECONDS)

    def stop(self, which: signal.Signals = signal.SIGTERM) -> Ending:
        """Send the signal to the server's process alone, as service managers do, and wait for the end."""
        sent = time.monotonic()
        self.send(which)
        status = self.wait(STOP_SECONDS)
        return Ending(status, time.monotonic() - sent, self.survivors())


def held_port() -> socket.socket:
    """A socket bound to a free port, which stays this test's while the socket is open.

    A server that binds with SO_REUSEADDR, as servers do, gets the port, since nobody listens on it. The system gives it
    to nobody who asks for any port: no other server, no connection (the one that asks whether the server answers could
    else meet itself).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
