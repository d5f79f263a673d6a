"""A short storm: each answer on a cache that preempts is the one alone. ``python -m tests.serve.storm`` asks more."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Lab
from tests.serve.api_server import ApiServer
from tests.serve.storm import SESSION_LEN, Kept, make_request, options, storm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

REQUESTS = 40


@pytest.fixture(scope="module")
def crowded(lab: Lab) -> Iterator[ApiServer]:
    with ApiServer(lab.model("qwen2"), *options(graph=False), session_len=SESSION_LEN) as server:
        server.ready()
        yield server


def test_answers_in_a_storm_are_those_alone(crowded: ApiServer, tmp_path: Path) -> None:
    kept = Kept(tmp_path / "answers.jsonl")
    report = storm(crowded, REQUESTS, 1, kept)
    assert report["passed"], report["wrong"]
    assert report["ends"].keys() == {"stop", "length", "tool_calls"}
    again = Kept(tmp_path / "answers.jsonl")
    assert again.wrong == dict.fromkeys(range(REQUESTS), "")
    assert storm(crowded, REQUESTS, 1, again)["seconds"] == [0, 0], "a run goes on from its file"


def test_the_requests_have_everything() -> None:
    bodies = [make_request(1, number)[1] for number in range(REQUESTS)]
    fields = set().union(*bodies)
    assert fields >= {"stop", "tool_choice", "presence_penalty", "seed", "n", "logprobs", "min_new_tokens"}
    styles = {body["response_format"]["type"] for body in bodies if "response_format" in body}
    assert styles == {"json_schema", "regex_schema"}
