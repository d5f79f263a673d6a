"""What cannot be served gets a 4xx that names the field, on every endpoint, and the server answers the next request."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

HELLO = [{"role": "user", "content": "hello"}]
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 4}),
    "completions": ("/v1/completions", {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 4}),
    "generate": ("/generate", {"prompt": "hello", "max_tokens": 4}),
    "responses": ("/v1/responses", {"model": MODEL_NAME, "input": "hello", "max_output_tokens": 4}),
    "messages": ("/v1/messages", {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 4}),
}
GROUP = {
    "master_address": "::1",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "trainer",
}
HUGE = 2**70
NAN, INF = math.nan, math.inf
ALL = tuple(ENDPOINTS)
TEXT = ("chat", "completions", "generate")
OPENAI = (*TEXT, "responses")

# field -> (endpoints whose protocol has it, values that none of them may serve)
BAD: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "temperature": (ALL, [-1, 3, NAN, INF, "x"]),
    "top_p": (ALL, [-0.5, 2, NAN, "x"]),
    "top_k": (ALL, [-1, 1.5, NAN, "x"]),
    # LMDeploy 0.18 itself: a 500 on two of these four
    "min_p": (OPENAI, [-1, 2, NAN, INF, "x"]),
    # LMDeploy 0.18 itself: taken for 1 in silence, or logits of infinity and NaN
    "repetition_penalty": (OPENAI, [0, -1, NAN, INF, 1e-320, 1e308]),
    "presence_penalty": (("chat", "completions", "responses"), [-2.5, 3, NAN, INF, "x"]),
    "frequency_penalty": (("chat", "completions", "responses"), [-2.5, 3, NAN, INF, "x"]),
    # LMDeploy 0.18 itself: what does not fit into 64 bits ends the engine's loop
    "repetition_ngram_size": (TEXT, [-1, 5000, HUGE]),
    "repetition_ngram_threshold": (TEXT, [-1, HUGE]),
    "min_new_tokens": (("chat",), [-1, 100, HUGE]),
    "max_tokens": ((*TEXT, "messages"), [-1, 0, 1.5]),
    "max_completion_tokens": (("chat", "completions"), [-1, 0]),
    "max_output_tokens": (("responses",), [-1, 0]),
    "n": (("chat", "completions"), [0, -1, 129, 1.5]),
    "stop": (TEXT, [[1], 5]),
    "stop_token_ids": (("generate",), [[1.5], "x", [None]]),
    "seed": ((*OPENAI,), [1.5, NAN]),
    "logprobs": (("completions",), [-5, 1.5]),
    "top_logprobs": (("chat",), [-1, 21]),
    "top_logprobs_num": (("generate",), [-1]),
    "logprob_start_len": (("generate",), [-2, HUGE]),
    "logit_bias": (("chat",), [{"5": NAN}, {"5": INF}, {"-1": 1}, {"100000": 1}, {"x": 1}, {"5": "x"}]),
    "prompt": (("completions",), [[], [[]], [1, "a"], [[1], "a"], [None], 7]),
    # LMDeploy 0.18 itself: dropped in silence, these and those below
    "suffix": (("completions",), ["b"]),
    "best_of": (ALL, [3]),
    "guided_json": (ALL, [{"type": "object"}]),
    "functions": (("chat",), [[{"name": "f"}]]),
    "include": (("responses",), [["message.output_text.logprobs"]]),
    "max_tool_calls": (("responses",), [1]),
    "stop_sequences": (("messages",), [[1], 5]),
    "mcp_servers": (("messages",), [[{"url": "http://localhost"}]]),
    "response_format": (("chat",), [{"type": "haiku"}, {"type": "regex_schema"}]),
}
BESIDE: dict[str, dict[str, Any]] = {
    "logprob_start_len": {"return_logprob": True, "max_tokens": 0},
    "top_logprobs": {"logprobs": True},
    "top_logprobs_num": {"return_logprob": True},
    "repetition_ngram_size": {"repetition_ngram_threshold": 2},
    "repetition_ngram_threshold": {"repetition_ngram_size": 2},
}
NAMES = {"max_tokens": "max_(new_)?tokens", "max_completion_tokens": "max_(new|completion)", "n": r"\bn\b"}
"""What a message must hold, where it is not the field's name."""

CASES = [
    pytest.param(endpoint, field, value, id=f"{endpoint}-{field}-{value}")
    for field, (endpoints, values) in BAD.items()
    for endpoint in endpoints
    for value in values
]


@pytest.fixture(autouse=True)
def the_server_lives(server: ApiServer) -> Iterator[None]:
    """Whatever a test sent, the next request is answered."""
    yield
    status, body = ask(server, "generate")
    assert status == 200, body


def ask(server: ApiServer, endpoint: str, **fields: Any) -> tuple[int, str]:
    """Status and body of a request with these fields instead of the usual ones."""
    path, body = ENDPOINTS[endpoint]
    return server.request("POST", path, json.dumps(body | fields).encode())


def served(server: ApiServer, endpoint: str, **fields: Any) -> dict[str, Any]:
    status, body = ask(server, endpoint, **fields)
    assert status == 200, body
    return json.loads(body)


@pytest.mark.parametrize(("endpoint", "field", "value"), CASES)
def test_a_field_that_cannot_be_served(endpoint: str, field: str, value: Any, server: ApiServer):
    status, body = ask(server, endpoint, **BESIDE.get(field, {}) | {field: value})
    assert status == 400, f"{status}: {body}"
    message = json.loads(body).get("message") or json.loads(body)["error"]["message"]
    assert re.search(NAMES.get(field, field), message), message


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/v1/chat/completions", b'{"model": "tiny", "messages": [', 400, ""),
        ("/v1/completions", b"", 400, ""),
        ("/v1/chat/completions", {"model": MODEL_NAME}, 400, "messages"),
        ("/v1/completions", {"model": "gpt", "prompt": "hello"}, 404, "gpt"),
        # LMDeploy 0.18 itself: AssertionError in the engine's loop, after which every request gets a 503
        ("/v1/completions", {"model": MODEL_NAME, "prompt": ""}, 400, "empty"),
        ("/v1/completions", {"model": MODEL_NAME, "prompt": "hello " * 2000}, 400, "context length (1024)"),
        ("/generate", {"input_ids": [5, 10**6], "max_tokens": 4}, 400, "vocabulary of 1000"),
        ("/generate", {"input_ids": [HUGE], "max_tokens": 4}, 400, "vocabulary of 1000"),
        # LMDeploy 0.18 itself: a 500
        ("/pooling", {"input": "hello"}, 400, "reward"),
        # LMDeploy 0.18 itself: 200, and after waking up weights of whatever was in memory
        ("/sleep?level=2", {}, 400, "sleep(level=2)"),
        ("/sleep?level=3", {}, 400, "level"),
        # LMDeploy 0.18 itself: a 500 without a word
        ("/update_weights", {"serialized_named_tensors": ""}, 400, "update_params: new weights"),
        ("/init_weights_update_group", GROUP, 400, "init_weights_update_group: new weights"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_served(path: str, body: Any, status: int, word: str, server: ApiServer):
    got, text = server.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (got, word in text) == (status, True), f"{got}: {text}"
    assert server.request("GET", "/is_sleeping") == (200, '{"is_sleeping":false}')


def test_a_refused_request_leaves_no_session_behind(server: ApiServer):
    """LMDeploy 0.18 itself opens the session first: the second try is told that the session is occupied."""
    for _ in range(2):
        status, body = ask(server, "completions", session_id=77, min_p=2)
        assert (status, "min_p" in body) == (400, True), body
    served(server, "completions", session_id=77)


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("completions", {"n": None}),
        ("completions", {"suffix": "", "best_of": 1, "user": "me", "store": True}),
        ("completions", {"n": 2, "best_of": 2}),
        ("completions", {"prompt": [5, 6]}),
        ("chat", {"modalities": ["text"], "length_penalty": 1.0, "metadata": {"a": "b"}}),
        ("responses", {"include": [], "reasoning": {"effort": "low"}, "service_tier": "auto"}),
        ("messages", {"metadata": {"user_id": "me"}, "service_tier": "auto"}),
        ("generate", {"stop": "no such word"}),
        ("chat", {"seed": HUGE}),
        ("chat", {"seed": -1}),
        ("generate", {"top_k": HUGE}),
        ("generate", {"stop_token_ids": [-1, HUGE]}),
        ("chat", {"max_tokens": HUGE, "max_completion_tokens": 4}),
        ("generate", {"repetition_ngram_size": 3, "repetition_ngram_threshold": 2}),
    ],
    ids=str,
)
def test_unusual_values_that_mean_something_are_served(
    endpoint: str, fields: dict[str, Any], server: ApiServer
):
    served(server, endpoint, **fields)


def test_a_temperature_next_to_zero_draws_the_likeliest_token(server: ApiServer):
    """LMDeploy 0.18 itself divides by it: logits of infinity, and of NaN the first token there is."""
    greedy = served(server, "generate", temperature=0, ignore_eos=True)["output_ids"]
    for temperature in (1e-30, 1e-40, 1e-320):
        assert served(server, "generate", temperature=temperature, ignore_eos=True)["output_ids"] == greedy


def test_logit_bias_is_added_in_the_engines_process(server: ApiServer):
    """LMDeploy 0.18 itself: a 500 for every logit_bias, since its processor cannot be sent to another process."""
    options = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    plain = served(server, "chat", **options)["choices"][0]["output_ids"]
    assert set(plain) != {7}
    biased = served(server, "chat", logit_bias={"7": 100}, **options)["choices"][0]["output_ids"]
    assert biased == [7] * 4
    forbidden = {str(token): -100 for token in plain}
    assert not set(plain) & set(
        served(server, "chat", logit_bias=forbidden, **options)["choices"][0]["output_ids"]
    )


def test_logprobs_of_the_input(server: ApiServer):
    """As documented by LMDeploy: max_tokens of 0 scores the prompt. The server has to be there afterwards."""
    scoring = {"prompt": "hello world", "max_tokens": 0, "return_logprob": True, "logprob_start_len": 0}
    meta = served(server, "generate", **scoring)["meta_info"]
    rows = meta["input_token_logprobs"]
    assert len(rows) == meta["prompt_tokens"] - 1 > 0
    assert all(logprob < 0 for logprob, _ in rows)
