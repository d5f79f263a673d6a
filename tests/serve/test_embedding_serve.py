"""``dlinfer serve`` on a folder of an embedding model or a reranker: which server starts, and what it refuses."""

import json
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from dlinfer.cli import parser_of_all
from dlinfer.cli.serve import _supervisor
from dlinfer.embedding.folder import task_of
from tests.embedding import tiny
from tests.serve.api_server import held_port
from tests.serve.processes import ProcessTree


def started(*words: str) -> list[str]:
    """The command line of the first server that ``dlinfer serve`` would start."""
    arguments = parser_of_all().parse_args(["serve", *words, "--replicas", "1"])
    return [str(word) for word in _supervisor(arguments)._replicas[0]._words]


def write_config(folder: Path, **config: Any) -> str:
    tiny.write(folder, "config.json", config)
    return str(folder)


def test_a_generating_model_is_lmdeploys(tmp_path: Path):
    folder = write_config(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    assert started(folder)[2:5] == ["lmdeploy", "serve", "api_server"]
    assert started("a/hub-id")[2:5] == ["lmdeploy", "serve", "api_server"]
    assert started(folder, "--task", "rerank")[2] == "dlinfer.embedding.server"
    assert task_of(tmp_path / "none") is None


def test_an_embedding_model_is_ours(tmp_path: Path):
    folder = write_config(tmp_path, architectures=["BertModel"], model_type="bert")
    tiny.sentence_files(tmp_path, "mean")
    words = started(folder, "--server-port", "4000", "--batch-tokens", "64", "--server-name=127.0.0.1")
    assert words[2:] == [
        "dlinfer.embedding.server", folder, "--task", "embed", "--batch-tokens", "64",
        "--server-name", "127.0.0.1", "--server-port", "4000",
    ]  # fmt: skip
    assert started(folder, "--task", "generate")[2] == "lmdeploy"


def test_a_reranker_is_ours(tmp_path: Path):
    folder = write_config(tmp_path, architectures=["BertForSequenceClassification"], model_type="bert")
    assert started(folder)[2:6] == ["dlinfer.embedding.server", folder, "--task", "rerank"]


def test_options_are_checked_before_servers_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_config(tmp_path, architectures=["BertModel"], model_type="bert")
    arguments = parser_of_all().parse_args(["serve", folder, "--replicas", "1"])
    assert arguments.run(arguments) == 2
    assert "--pooling" in capsys.readouterr().err
    arguments = parser_of_all().parse_args(["serve", folder, "--session-len", "4096"])
    with pytest.raises(SystemExit):
        arguments.run(arguments)
    assert "unrecognized arguments: --session-len 4096" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_two_replicas_behind_the_router(tmp_path: Path):
    folder = tiny.sentence_files(tiny.build(tmp_path, "bert"), "mean", max_seq_length=40)
    with held_port() as held:
        port = held.getsockname()[1]
    where = ["--server-name", "127.0.0.1", "--server-port", str(port), "--model-name", "tiny"]
    command = [
        sys.executable,
        "-m",
        "dlinfer",
        "serve",
        str(folder),
        *where,
        "--join-key",
        str(tmp_path / "key"),
    ]
    (tmp_path / "key").write_text("secret")

    def ask(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=60) as answer:
            return answer.read().decode()

    with ProcessTree(command) as serve:
        end = time.monotonic() + 300
        while "ready at" not in serve.output():
            assert time.monotonic() < end, serve.output()
            time.sleep(0.2)
        answer = json.loads(ask("/v1/embeddings", {"model": "tiny", "input": tiny.TEXTS}))
        assert [one["index"] for one in answer["data"]] == list(range(len(tiny.TEXTS)))
        assert json.loads(ask("/v1/models"))["data"][0]["id"] == "tiny"
        assert 'dlinfer:embedding_requests_total{path="/v1/embeddings",replica="0",status="200"} 1.0' in ask(
            "/metrics"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask("/v1/embeddings", {"input": "a", "dimensions": 4})
        assert json.loads(refused.value.read())["error"]["param"] == "dimensions"
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(60) == 0
