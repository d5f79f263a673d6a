"""Requests that cannot be served get LMDeploy's own error, and the engine serves the next one.

What LMDeploy 0.18 does on cuda, from its source:

- prompt of session_len tokens or more: error context_length_exceeded (serve/core/async_engine.py:549-552).
- max_new_tokens=0: error invalid_request (async_engine.py:563-566). More than fits is cut down with a warning
  (pytorch/engine/engine.py:474-480).
- empty batch: an empty list (pipeline.py:126-138 loops over nothing).
- empty prompt, where the tokenizer adds no token of its own: ``assert len(token_ids) > 0`` inside the engine's loop
  (engine.py:494), which ends it; each later request gets engine_unavailable. Here: invalid_request.
- a token id, stop id or bad id outside the vocabulary, top_k or logprobs beyond its size: embedding (engine loop),
  ``gather`` (logits_process.py:53) and ``torch.topk`` (:540, :555) raise there, or assert on a GPU; the same end.
  Here: invalid_request for a prompt's ids, and no effect for the others, which cannot mean anything else.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.processes import ProcessTree

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

JOB = Path(__file__).with_name("requests_job.py")
SUFFIX = ", then a good prompt"
TOO_LONG = "must be smaller than the model context length (64)."
EMPTY = "The prompt is empty: there is no token to continue from."

Answers = dict[str, Any]


@pytest.fixture(scope="module")
def answers(model: Path) -> Answers:
    with ProcessTree([sys.executable, str(JOB), str(model)]) as job:
        assert job.wait(500) == 0, job.output()[-4000:]
        assert job.survivors() == []
        return json.loads(job.last_line())


@pytest.fixture(scope="module")
def good(answers: Answers) -> dict[str, Any]:
    """What the good prompt gets."""
    response = answers[f"empty batch{SUFFIX}"][0]
    assert len(response["token_ids"]) == 4
    return response


def error(code: str, message: str) -> dict[str, Any]:
    return {"token_ids": [], "finish_reason": "error", "error_code": code, "error_message": message}


def test_engine_serves_a_good_prompt_after_each(answers: Answers, good: dict[str, Any]):
    after = {name: answer for name, answer in answers.items() if name.endswith(SUFFIX)}
    assert len(after) == len(answers) / 2
    assert after == {name: [good] for name in after}


def test_long_prompt(answers: Answers, good: dict[str, Any]):
    (response,) = answers["long prompt"]
    assert response == error("context_length_exceeded", response["error_message"])
    assert response["error_message"].endswith(TOO_LONG)
    assert answers["long prompt beside a good one"] == [response, good]


def test_longest_prompt_gets_one_token(answers: Answers):
    assert answers["prompt of session_len"] == {"raised": f"RequestError: Input length (64) {TOO_LONG}"}
    (response,) = answers["prompt one shorter"]
    assert len(response["token_ids"]) == 1


def test_max_new_tokens(answers: Answers):
    assert answers["max_new_tokens=0"] == [
        error("invalid_request", "max_new_tokens must be at least 1, got 0.")
    ]
    (response,) = answers["max_new_tokens beyond session_len"]
    assert response["finish_reason"] == "length"
    assert 4 < len(response["token_ids"]) < 64


def test_empty(answers: Answers, good: dict[str, Any]):
    assert answers["empty batch"] == []
    assert answers["empty prompt"] == [error("invalid_request", EMPTY)]
    assert answers["empty prompt beside a good one"] == [error("invalid_request", EMPTY), good]
    assert answers["no token ids"] == {"raised": f"RequestError: {EMPTY}"}


@pytest.mark.parametrize(("name", "token"), [("token id too large", 10**6), ("negative token id", -7)])
def test_token_outside_the_vocabulary(name: str, token: int, answers: Answers):
    assert answers[name] == {
        "raised": f"RequestError: Token id {token} is outside the model's vocabulary of 1000."
    }


@pytest.mark.parametrize("what", ["nothing", "a prompt too long", "a token id too large"])
def test_perplexity_raises(what: str, answers: Answers):
    assert "raised" in answers[f"ppl of {what}"]


@pytest.mark.parametrize("what", ["stop ids outside", "bad ids outside", "logprobs beyond"])
def test_options_beyond_the_vocabulary_change_nothing(what: str, answers: Answers, good: dict[str, Any]):
    assert answers[f"{what} the vocabulary"] == [good]


def test_top_k_beyond_the_vocabulary_means_every_token(answers: Answers):
    (response,) = answers["top_k beyond the vocabulary"]
    assert len(response["token_ids"]) == 4
