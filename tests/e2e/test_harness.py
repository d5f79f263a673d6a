"""The harness itself: what it runs ends, and what it compares is compared."""

import contextlib
import sys
import time

import numpy as np
import pytest

from tests.e2e import processes
from tests.e2e.cell_checks import BF16_TIE, check_logits, compare_tokens
from tests.e2e.harness import EngineRun
from tests.e2e.processes import Processes, run_process

pytestmark = pytest.mark.e2e

ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], {pipes})"


def test_a_process_that_does_not_end_is_killed() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"still running after 0\.5 s"):
        run_process([sys.executable, "-c", "import time; print('started'); time.sleep(600)"], timeout=0.5)
    assert time.monotonic() - start < 300


def test_an_orphan_is_reported_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 1.0)
    closed = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    with pytest.raises(AssertionError, match="left processes behind"):
        run_process([sys.executable, "-c", ORPHAN.format(pipes=closed)], timeout=300)


def test_those_that_ask_in_one_environment_share_a_process() -> None:
    processes = Processes(kept=2)
    first, again, other, third, anew = (
        processes.ask("tests.echo_job", {}, 60, {"SEEN": seen}).split()[1]
        for seen in ("a", "a", "b", "c", "a")
    )
    assert first == again
    assert len({first, other, third, anew}) == 4, "of three the one is ended that was asked longest ago"
    processes.close()


def test_a_job_that_raises_or_ends_its_process_says_so() -> None:
    with contextlib.closing(Processes()) as processes:
        with pytest.raises(AssertionError, match="told to"):
            processes.ask("tests.echo_job", {"do": "raise"}, 60, {})
        with pytest.raises(AssertionError, match="crash: ended with -6"):
            processes.ask("tests.echo_job", {"do": "abort"}, 60, {})
        assert "said hello" in processes.ask("tests.echo_job", {"say": "hello"}, 60, {})


def test_what_a_job_leaves_behind_is_reported_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 1.0)
    asked = Processes()
    asked.ask("tests.echo_job", {"do": "orphan"}, 60, {})
    with pytest.raises(AssertionError, match="left processes behind"):
        asked.close()


class Run(EngineRun):
    """An engine run with one step, said by the test."""

    def __init__(self, tokens: list[int], length: int = 3) -> None:
        response = {
            "token_ids": tokens,
            "input_token_len": length,
            "finish_reason": "length",
            "error_message": None,
        }
        self.results = {"batch": [response]}


def hf(gap: float) -> dict[str, np.ndarray]:
    return {
        "prompt_0": np.array([5, 6, 7]),
        "tokens_0": np.array([10, 11, 12]),
        "gap_0": np.array([1.0, gap, 1.0], dtype=np.float32),
    }


def test_equal_tokens_pass() -> None:
    assert compare_tokens("batch", Run([10, 11, 12]), hf(1.0), "float32") == []


@pytest.mark.parametrize(
    ("run", "gap", "dtype"),
    [
        (Run([10, 99, 12]), 1.0, "float32"),
        (Run([10, 99, 12]), 0.0, "float32"),  # float32 knows no ties
        (Run([10, 99, 12]), 2 * BF16_TIE, "bfloat16"),
        (Run([10, 11]), 0.0, "bfloat16"),  # too short is no tie
        (Run([10, 11, 12, 13]), 1.0, "float32"),
        (Run([]), 1.0, "float32"),
        (Run([10, 11, 12], length=4), 1.0, "float32"),
    ],
)
def test_differences_are_reported(run: Run, gap: float, dtype: str) -> None:
    assert len(compare_tokens("batch", run, hf(gap), dtype)) == 1


def test_a_tie_in_bfloat16_is_admitted() -> None:
    assert compare_tokens("batch", Run([10, 99, 98]), hf(BF16_TIE), "bfloat16") == []


def test_a_step_that_raised_raises_here() -> None:
    run = Run([])
    run.results = {"batch": {"raised": "Traceback: boom"}}
    with pytest.raises(AssertionError, match="boom"):
        compare_tokens("batch", run, hf(1.0), "float32")


def scored(logits: list[list[float]]) -> EngineRun:
    run = Run([])
    run.results = {"logits": [[len(logits), len(logits[0])]]}
    run.logits = {"logits/0": np.array(logits, dtype=np.float32)}
    return run


def test_logits_far_from_the_references_have_to_be_nearer_the_exact_ones() -> None:
    theirs, exact = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.3, 2.0], [3.0, 4.0]])
    asked = []

    def ask_exact() -> list[np.ndarray]:
        asked.append(True)
        return [exact]

    near = check_logits("logits", scored([[1.1, 2.0], [3.1, 4.0]]), [theirs], "bfloat16", ask_exact)
    assert near == [] and not asked
    better = check_logits("logits", scored([[1.4, 2.0], [3.0, 4.0]]), [theirs], "bfloat16", ask_exact)
    assert better == [] and asked
    (worse,) = check_logits("logits", scored([[1.4, 2.0], [3.0, 4.2]]), [theirs], "bfloat16", ask_exact)
    assert "positions [1]" in worse
    nan = float("nan")
    assert check_logits("logits", scored([[nan, 2.0], [3.0, 4.0]]), [theirs], "bfloat16", ask_exact)
    assert check_logits("logits", scored([[1.4, 2.0], [3.0, 4.0]]), [theirs], "float32", ask_exact)
    assert check_logits("logits", scored([[1.4, 2.0], [3.0, 4.0]]), [theirs], "bfloat16")
