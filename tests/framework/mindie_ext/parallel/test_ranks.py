"""Two ranks, a process each: the tokens of one, and what becomes of a rank when another is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.mindie_ext.errors import RankError
from dlinfer.framework.mindie_ext.parallel import join
from dlinfer.framework.mindie_ext.parallel.shard import refuse_unspread
from tests.e2e.harness import Lab
from tests.workers import ROOT

JOB = "tests.framework.mindie_ext.parallel.rank_job"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def ranks(count: int, model: Path, folder: Path, what: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of all ranks; none is left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                JOB,
                str(rank),
                str(count),
                port,
                str(model),
                str(folder / f"{rank}.json"),
                what,
            ],
            cwd=ROOT,
            env=environment,
            stdout=(folder / f"{rank}.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def answers(count: int, model: Path, folder: Path) -> tuple[list[list[list[int]]], list[torch.Tensor]]:
    with ranks(count, model, folder, "tokens") as processes:
        for rank, process in enumerate(processes):
            assert process.wait(timeout=120) == 0, (folder / f"{rank}.log").read_text()[-2000:]
    tokens = [json.loads((folder / f"{rank}.json").read_text())["tokens"] for rank in range(count)]
    return tokens, [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.mark.parametrize(
    "family",
    ["qwen2", *(pytest.param(f, marks=pytest.mark.full) for f in ("llama_llama3", "qwen3", "mixtral"))],
)
def test_two_ranks_give_what_one_gives(lab: Lab, tmp_path: Path, family: str) -> None:
    """Greedy tokens are equal, drawn ones on both ranks; logits differ by the order of float32 sums over two parts."""
    model = lab.model(family)
    (alone,), (expected,) = answers(1, model, tmp_path / "one")
    both, logits = answers(2, model, tmp_path / "two")
    assert both[0][:3] == both[1][:3] == alone[:3]
    assert both[0][3] == both[1][3]
    for one in logits:
        assert (one - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("what", ["steps for ever", "wait between steps"])
def test_a_killed_rank_ends_the_other(lab: Lab, tmp_path: Path, what: str) -> None:
    with ranks(2, lab.model("qwen2"), tmp_path, what) as processes:
        wait_for([tmp_path / "0.ready", tmp_path / "1.ready"])
        time.sleep(0.5)
        processes[1].send_signal(signal.SIGKILL)
        killed = time.time()
        (tmp_path / "0.go").touch()
        processes[0].wait(timeout=30)
    answer = json.loads((tmp_path / "0.json").read_text())
    assert answer["error"] == "RankLostError"
    assert "rank 0 of 2" in answer["text"]
    assert answer["at"] - killed < 10


@pytest.mark.full
def test_ten_starts_leave_no_process(lab: Lab, tmp_path: Path) -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    for number in range(10):
        answers(2, lab.model("qwen2"), tmp_path / str(number))
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before


def wait_for(files: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv(name)
    with pytest.raises(RankError, match=name):
        join(0, 2, "cpu")


def test_a_port_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "many")
    with pytest.raises(RankError, match="'many'"):
        join(0, 2, "cpu")


def test_what_cannot_be_spread_is_refused_by_name() -> None:
    from transformers import LlamaConfig, OPTConfig

    with pytest.raises(UnsupportedFeatureError, match="num_key_value_heads = 3"):
        refuse_unspread(LlamaConfig(num_attention_heads=6, num_key_value_heads=3, hidden_size=48), 2)
    with pytest.raises(UnsupportedFeatureError, match="opt"):
        refuse_unspread(OPTConfig(), 2)
