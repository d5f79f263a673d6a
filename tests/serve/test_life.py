"""How a server starts and ends: no failed start, no hang, no process left behind, whatever ends it and when."""

import signal
import socket
from pathlib import Path

import pytest

from tests.serve.api_server import ENDED_BY_SIGTERM, MODEL_NAME, STOP_SECONDS, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

STARTS = 20
TOKENS = 100


@pytest.mark.full
def test_sigterm_during_a_request_lets_it_finish_and_ends_clean(model: Path):
    """The engine stands still until the server has begun to end, so that the request cannot be over before."""
    with ApiServer(model) as server, server.client() as client:
        server.ready()
        engine = server.engine_process()
        engine.suspend()
        stream = client.completions.create(
            model=MODEL_NAME,
            prompt="hello world",
            max_tokens=TOKENS,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )  # returns with the head of the answer
        server.send(signal.SIGTERM)
        server.says("Waiting for connections to close")
        engine.resume()
        chunks = list(stream)
        status = server.wait(STOP_SECONDS)
        assert status == ENDED_BY_SIGTERM, server.output()
        assert server.survivors() == []
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert [reason for reason in reasons if reason] == ["length"]
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [TOKENS]
        assert not server.answers()


@pytest.mark.parametrize(
    "which",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)],
    ids=lambda which: which.name,
)
@pytest.mark.full
def test_signal_while_the_engine_loads(which: signal.Signals, model: Path):
    """LMDeploy 0.18 itself: SIGTERM leaves Manager and engine behind; SIGINT waits for the engine for ever."""
    with ApiServer(model) as server:
        server.engine_process()
        ending = server.stop(which)
        assert ending.status == -which, server.output()
        assert ending.survivors == []


@pytest.mark.full
def test_sigkill_of_the_server_ends_its_engine(model: Path):
    """LMDeploy 0.18 itself leaves the engine running, with the model in memory, for ever."""
    with ApiServer(model) as server:
        server.ready()
        assert server.stop(signal.SIGKILL).survivors == []


@pytest.mark.full
def test_sigint_to_the_whole_group(model: Path):
    """Ctrl-C in a terminal reaches the engine too."""
    with ApiServer(model) as server:
        server.ready()
        for process in server.alive():
            process.send_signal(signal.SIGINT)
        assert server.wait(STOP_SECONDS) == 0, server.output()
        assert server.survivors() == []


@pytest.mark.full
def test_port_in_use_ends_the_server(model: Path):
    """LMDeploy 0.18 itself, on Python 3.11: hangs in EngineHealthMonitor.stop, whose only cancellation is lost."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        with ApiServer(model, port=other.getsockname()[1]) as server:
            assert server.wait(STOP_SECONDS) != 0
            assert "address already in use" in server.output()
            assert server.survivors() == []


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_twenty_starts_of_twenty(model: Path, capsys: pytest.CaptureFixture[str]):
    rows = [f"{'start':>5} {'ready s':>8} {'stop s':>7}  outcome"]
    good = 0
    for number in range(1, STARTS + 1):
        with ApiServer(model) as server:
            try:
                ready = server.ready()
                with server.client() as client:
                    client.completions.create(model=MODEL_NAME, prompt="hello", max_tokens=4)
                ending = server.stop()
            except AssertionError as error:
                rows.append(f"{number:>5} {'-':>8} {'-':>7}  {error}")
                continue
        outcome = "ok" if ending.status == ENDED_BY_SIGTERM and not ending.survivors else repr(ending)
        good += outcome == "ok"
        rows.append(f"{number:>5} {ready:>8.1f} {ending.seconds:>7.1f}  {outcome}")
    with capsys.disabled():
        print("\n" + "\n".join(rows))
    assert good == STARTS, "\n".join(rows)
