"""``/pooling`` of a reward model: a score, or a 400 that says why there is none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Lab
from tests.e2e.test_reward import TOLERANCE, score
from tests.serve.api_server import ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

SEQUENCES = [list(range(10, 30)), [7]]


@pytest.fixture(scope="module")
def reward_model(lab: Lab) -> Path:
    return lab.model("qwen2_reward")


@pytest.fixture(scope="module")
def pooling(reward_model: Path) -> Iterator[ApiServer]:
    with ApiServer(reward_model, "--eager-mode") as server:
        server.ready()
        yield server


def ask(server: ApiServer, given: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    status, body = server.request("POST", "/pooling", json.dumps({"input": given} | fields).encode())
    return status, json.loads(body)


def test_scores_are_those_of_transformers(lab: Lab, reward_model: Path, pooling: ApiServer):
    """LMDeploy 0.18 itself: a 500 for a text of one token."""
    hf = lab.reference(reward_model, score=SEQUENCES, hidden=True)
    for number, sequence in enumerate(SEQUENCES):
        status, body = ask(pooling, sequence)
        assert status == 200, body
        expected = score(reward_model, hf[f"hidden_{number}"])
        assert body["data"][0]["data"] == pytest.approx(expected, abs=TOLERANCE)
    status, body = ask(pooling, SEQUENCES)
    assert [row["index"] for row in body["data"]] == [0, 1]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "empty"),
        ([], "empty"),
        ([[5], []], "empty"),
        (["hello", ""], "empty"),
        ([5, 10**6], "outside the model's vocabulary"),
        ([-1], "outside the model's vocabulary"),
        ("hello " * 3000, "session_len"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_has_no_score(given: Any, reason: str, pooling: ApiServer):
    """LMDeploy 0.18 itself: a 500 each."""
    status, body = ask(pooling, given)
    assert (status, reason in body["message"]) == (400, True), body
    assert ask(pooling, [5, 6])[0] == 200


@pytest.mark.parametrize("fields", [{"encoding_format": "base64"}, {"dimensions": 8}], ids=str)
def test_fields_that_nobody_reads(fields: dict[str, Any], pooling: ApiServer):
    status, body = ask(pooling, "hello", **fields)
    assert (status, next(iter(fields)) in body["message"]) == (400, True), body
