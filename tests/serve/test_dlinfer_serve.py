"""``dlinfer serve`` as a user runs it, with the real router, and stubs in place of LMDeploy's servers."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.api_server import held_port
from tests.serve.processes import ROOT, ProcessTree
from tests.serve.test_addresses import needs_ipv6
from tests.serve.test_cluster_files import metrics_of_dashboard
from tests.serve.test_server_metrics import NOT_OF_A_SERVER

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class Serve(ProcessTree):
    """The command; ``url`` is the router's."""

    def __init__(self, *options: str, model: str = "model") -> None:
        with held_port() as held:
            self.port = held.getsockname()[1]
        where = ["--server-name", "127.0.0.1", "--server-port", str(self.port)]
        super().__init__([sys.executable, "-m", "tests.serve.stub_serve", model, *where, *options])
        self.url = f"http://127.0.0.1:{self.port}"

    def servers(self) -> list[psutil.Process]:
        """The stubs, in the order of their replicas' numbers."""
        stubs = [one for one in self.alive() if "benchmarks.routers.stub" in one.cmdline()]
        urls = [line.split()[4].rstrip(",") for line in self.output().splitlines() if ": replica " in line]
        return sorted(
            stubs, key=lambda one: [url.endswith(f":{one.cmdline()[3]}") for url in urls], reverse=True
        )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def replicas(self) -> list[dict[str, Any]]:
        return json.loads(self.get("/dlinfer/replicas"))["replicas"]

    def chat(self, number: int, tokens: int = 4, delay: float = 0.01, stream: bool = False) -> str:
        """``right``, or what was wrong with one answer."""
        task = json.dumps({"id": number, "tokens": tokens, "delay": delay})
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"{number} TASK{task}"}],
            "stream": stream,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"
        except (OSError, HTTPException) as error:
            return type(error).__name__
        words = " ".join(f"{number}.{token}" for token in range(tokens))
        if stream:
            chunks = [line[6:] for line in text.splitlines() if line.startswith('data: {"id')]
            told = "".join(json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in chunks)
            return (
                "right" if told == words and "data: [DONE]" in text else f"ended as if whole: {text[-200:]}"
            )
        answer = json.loads(text)
        self.last_port = answer["port"]
        return "right" if answer["choices"][0]["message"]["content"] == words else text

    def wait_for(self, state: str, number: int) -> None:
        end = time.monotonic() + 60
        while self.replicas()[number]["state"] != state:
            assert time.monotonic() < end, self.output()[-3000:]
            time.sleep(0.05)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text("a secret\n")
    return file


@pytest.fixture(scope="module")
def serve(key: Path) -> Iterator[Serve]:
    with Serve("--replicas", "2", "--join-key", str(key)) as serve:
        serve.says("ready at")
        yield serve


def test_the_turns_of_a_conversation_reach_one_replica(serve: Serve):
    ports = set()
    for number in range(12):
        assert serve.chat(number) == "right"
        first = serve.last_port
        assert serve.chat(number) == "right"
        assert serve.last_port == first
        ports.add(first)
    assert len(ports) == 2


def test_errors_and_bodies_pass_unchanged(serve: Serve):
    for status in (400, 404, 422, 429, 503):
        request = {"messages": [{"role": "user", "content": f'TASK{{"status": {status}}}'}], "of_lmdeploy": 1}
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(
                f"{serve.url}/v1/chat/completions", json.dumps(request).encode(), timeout=60
            )
        assert caught.value.code == status
        assert json.loads(caught.value.read())["message"] == f"error {status}"


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_port_in_use_is_an_error_before_anything_starts(serve: Serve, replicas: str):
    where = ["--server-name", "127.0.0.1", "--server-port", str(serve.port)]
    command = [sys.executable, "-m", "tests.serve.stub_serve", "model", *where, "--replicas", replicas]
    with ProcessTree(command) as second:
        assert second.process.wait(60) == 2
        assert f"cannot listen on 127.0.0.1:{serve.port}: Address already in use" in second.output()
        assert "replica 0" not in second.output()


def test_paths_of_one_server_are_refused(serve: Serve):
    for path in ("/sleep", "/update_weights", "/update_weights_from_ipc", "/distserve/engine_info"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{serve.url}{path}", b"{}", timeout=60)
        assert caught.value.code == 501
        assert "a single server" in json.loads(caught.value.read())["message"]


def test_a_killed_replica_loses_no_answer_and_comes_back(serve: Serve):
    with ThreadPoolExecutor(16) as pool:
        plain = [pool.submit(serve.chat, number, 40, 0.05) for number in range(8)]
        streams = [pool.submit(serve.chat, number, 40, 0.05, True) for number in range(8, 16)]
        time.sleep(0.8)
        serve.servers()[0].kill()
        assert Counter(one.result() for one in plain) == {"right": 8}
        ends = Counter(one.result() for one in streams)
    assert ends["right"] < 8  # some were cut
    assert not [end for end in ends if end.startswith("ended as if whole")]
    serve.wait_for("ready", 0)
    assert [replica["restarts"] for replica in serve.replicas()] == [1, 0]
    page = serve.get("/metrics")
    assert 'dlinfer:replica_restarts_total{replica="0"} 1.0' in page
    names = [name for name in metrics_of_dashboard() if name.startswith(NOT_OF_A_SERVER)]
    assert [name for name in names if f"\n{name}" not in page] == []


def test_a_rolling_restart_fails_no_request(serve: Serve):
    before = {one.pid for one in serve.servers()}
    with ThreadPoolExecutor(4) as pool:
        serve.send(signal.SIGHUP)
        answers = []
        while "all replicas were restarted" not in serve.output():
            assert serve.process.poll() is None, serve.output()[-3000:]
            answers += pool.map(lambda number: serve.chat(number, 10, 0.01, bool(number % 2)), range(4))
    assert Counter(answers) == {"right": len(answers)}
    assert before.isdisjoint(one.pid for one in serve.servers())
    assert [replica["restarts"] for replica in serve.replicas()] == [1, 0]


def test_another_machine_joins_and_leaves(serve: Serve, key: Path):
    with Serve("--replicas", "1", "--join", serve.url, "--join-key", str(key)) as other:
        other.says(f"ready at {serve.url}")
        theirs = other.servers()[0].cmdline()[3]
        end, ports = time.monotonic() + 60, set()
        while theirs not in ports and time.monotonic() < end:
            for number in range(20):
                assert serve.chat(number, 1, 0) == "right"
                ports.add(str(serve.last_port))
        assert theirs in ports
        assert json.loads(serve.get("/dlinfer/replicas"))["joined"] == 1
        other.send(signal.SIGTERM)
        answers = []
        while other.process.poll() is None:
            answers += [serve.chat(number, 2, 0.01) for number in range(10)]
        assert Counter(answers) == {"right": len(answers)}
        assert other.wait(60) == 0
    assert json.loads(serve.get("/dlinfer/replicas"))["joined"] == 0


@pytest.mark.parametrize(
    ("secret", "urls", "status"),
    [
        ("another", ["http://10.0.0.1:80"], 403),
        ("", ["http://10.0.0.1:80"], 403),
        ("a secret", ["file:///etc/passwd"], 400),
        ("a secret", "x", 400),
    ],
)
def test_who_may_not_join(serve: Serve, secret: str, urls: Any, status: int):
    request = urllib.request.Request(
        f"{serve.url}/dlinfer/replicas",
        json.dumps({"urls": urls}).encode(),
        {"x-join-key": secret},
        method="PUT",
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == status
    assert json.loads(serve.get("/dlinfer/replicas"))["joined"] == 0


def test_sigterm_lets_requests_finish(serve: Serve):
    """The last test of the shared command."""
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(serve.chat, number, 20, 0.1, bool(number % 2)) for number in range(4)]
        time.sleep(0.7)
        serve.send(signal.SIGTERM)
        serve.says("refusing new requests")
        assert Counter(one.result() for one in running) == {"right": 4}
    assert serve.wait(60) == 0
    with suppress(psutil.Error):
        assert serve.survivors(10) == []


def test_a_replica_that_cannot_start():
    with Serve("--replicas", "2", model="broken") as serve:
        assert serve.wait(120) == 1
        output = serve.output()
    assert "ended 3 times in a row before it answered" in output
    assert "no weights in this folder" in output.partition("ended 3 times")[2]


def test_a_second_signal_kills_the_replicas():
    with Serve("--replicas", "2") as serve, ThreadPoolExecutor(1) as pool:
        serve.says("ready at")
        running = pool.submit(serve.chat, 0, 600, 1.0)
        time.sleep(0.7)
        serve.send(signal.SIGTERM)
        serve.says("refusing new requests")
        serve.send(signal.SIGTERM)
        assert serve.wait(60) == 0
        assert running.result() != "right"
        assert "ended with status" not in serve.output()  # no replica was started again


def test_the_reader_of_the_output_ends_first(tmp_path: Path):
    """As ``tee`` does on Ctrl-C."""
    with held_port() as held:
        port = str(held.getsockname()[1])
    where = ["--server-name", "127.0.0.1", "--server-port", port, "--replicas", "2"]
    command = [sys.executable, "-m", "tests.serve.stub_serve", "model", *where]
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as serve,
    ):
        try:
            assert serve.stdout is not None
            while "ready at" not in serve.stdout.readline():
                assert serve.poll() is None
            serve.stdout.close()
            serve.send_signal(signal.SIGINT)
            assert serve.wait(60) == 0
        finally:
            serve.kill()
        errors.seek(0)
        assert errors.read() == ""


@pytest.mark.parametrize(
    ("host", "shown"), [("localhost", "127.0.0.1"), pytest.param("::1", "[::1]", marks=needs_ipv6)]
)
@pytest.mark.parametrize("replicas", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_hosts_by_name_and_of_ipv6(host: str, replicas: str, shown: str):
    with Serve("--replicas", replicas, "--server-name", host) as serve:
        serve.url = f"http://{shown}:{serve.port}"
        serve.says(f"ready at {serve.url}")
        assert serve.chat(1) == "right"
        serve.send(signal.SIGTERM)
        assert serve.wait(60) == 0


@pytest.mark.full
@needs_ipv6
def test_servers_with_ipv6_join(key: Path):
    with Serve("--replicas", "1", "--join-key", str(key), "--server-name", "::1") as serve:
        serve.url = f"http://[::1]:{serve.port}"
        serve.says("ready at")
        join = ["--join", serve.url, "--join-key", str(key), "--server-name", "::"]
        with Serve("--replicas", "1", *join) as other:
            other.says(f"ready at {serve.url}")
            end = time.monotonic() + 60
            while json.loads(serve.get("/dlinfer/replicas"))["joined"] != 1:
                assert time.monotonic() < end, other.output()[-3000:]
                time.sleep(0.1)
            assert 'replica="[::1]:' in serve.get("/metrics")
            ports = {serve.last_port for number in range(40) if serve.chat(number, 1, 0) == "right"}
            assert len(ports) == 2


@pytest.mark.full
def test_a_wrong_key_ends_the_command(key: Path, tmp_path: Path):
    (tmp_path / "key").write_text("another")
    with Serve("--replicas", "2", "--join-key", str(key)) as serve:
        serve.says("ready at")
        with Serve("--replicas", "1", "--join", serve.url, "--join-key", str(tmp_path / "key")) as other:
            assert other.wait(60) == 1
            assert "it answers 403" in other.output()


@pytest.mark.full
def test_one_replica_has_no_router():
    with Serve("--replicas", "1") as serve:
        serve.says("ready at")
        assert serve.chat(1) == "right"
        assert not [one for one in serve.alive() if one.name() == "envoy"]
        serve.send(signal.SIGTERM)
        assert serve.wait(60) == 0


@pytest.mark.full
def test_sigkill_of_the_command_leaves_nothing():
    with Serve("--replicas", "2") as serve:
        serve.says("ready at")
        serve.process.kill()
        assert serve.survivors(20) == []
