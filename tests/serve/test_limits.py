"""A server with limits: too many requests, requests that take too long, and clients that leave."""

import time
from collections.abc import Iterator

import openai
import pytest

from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

HELLO = [{"role": "user", "content": "hello"}]
LONG = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
IDLE_SECONDS = 5.0
"""Seconds in which the engine has to stop computing a cancelled request. The rest of it takes tens of seconds."""


@pytest.fixture(scope="module")
def limited(model) -> Iterator[ApiServer]:
    with ApiServer(model, "--eager-mode", DLINFER_MAX_REQUESTS="2") as server:
        server.ready()
        yield server


def used_cache(server: ApiServer) -> float:
    """The fraction of the KV cache in use, as the server's metrics have it."""
    status, text = server.request("GET", "/metrics/")
    assert status == 200, text
    lines = [line for line in text.splitlines() if line.startswith("lmdeploy:gpu_cache_usage_perc")]
    assert len(lines) == 1, text
    return float(lines[0].rsplit(" ", 1)[1])


def assert_nothing_is_computed(server: ApiServer) -> None:
    """The engine comes to rest soon, and its cache is empty. The metric of the cache is renewed every ten seconds."""
    start, engine = time.monotonic(), server.engine_process()
    while engine.cpu_percent(interval=0.3) > 20:
        assert time.monotonic() < start + IDLE_SECONDS, "the engine still computes"
    while used_cache(server) > 0:
        assert time.monotonic() < start + 60, "blocks are still in use"
        time.sleep(0.1)


def test_a_third_request_is_refused_and_the_first_two_are_answered(limited):
    client = limited.client()
    streams = [
        client.chat.completions.create(**LONG, stream=True, stream_options={"include_usage": True})
        for _ in range(2)
    ]
    for stream in streams:
        next(stream)
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(**LONG | {"max_tokens": 1})
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert limited.request("GET", "/health")[0] == 200
    usages = [chunk.usage for stream in streams for chunk in stream if chunk.usage]
    assert [usage.completion_tokens for usage in usages] == [900, 900]


def test_a_request_that_takes_too_long_is_cancelled(limited):
    with pytest.raises(openai.APIStatusError, match=r"0\.3 s") as late:
        limited.client().chat.completions.create(**LONG, extra_headers={"X-Request-Timeout": "0.3"})
    assert late.value.status_code == 504
    assert_nothing_is_computed(limited)


def test_a_stream_that_takes_too_long_ends_with_an_error(limited):
    stream = limited.client().chat.completions.create(
        **LONG, stream=True, extra_headers={"X-Request-Timeout": "0.5"}
    )
    with pytest.raises(openai.APIError, match=r"0\.5 s"):
        for _ in stream:
            pass
    assert_nothing_is_computed(limited)


def test_a_client_that_leaves_frees_its_blocks(limited):
    stream = limited.client().chat.completions.create(**LONG, stream=True)
    next(stream)
    stream.close()
    assert_nothing_is_computed(limited)


@pytest.mark.parametrize("count", [0, 2])
def test_logprobs_need_a_mode(limited, count: int):
    """This server has none. LMDeploy 0.18 takes 0 for none, and an ``echo`` would return raw logits."""
    with pytest.raises(openai.BadRequestError, match="--logprobs-mode raw_logprobs"):
        limited.client().completions.create(model=MODEL_NAME, prompt="hello", echo=True, logprobs=count)
