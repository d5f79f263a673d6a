"""Stop strings on every endpoint, streamed and not: the text before the first of them, and its tokens."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

MOST = 40
HELLO = [{"role": "user", "content": "hello"}]
OPTIONS: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0}
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": MOST, "ignore_eos": True}),
    "completions": ("/v1/completions", {"prompt": "hello", "max_tokens": MOST, "ignore_eos": True}),
    "generate": ("/generate", {"prompt": "hello", "max_tokens": MOST, "ignore_eos": True}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": MOST, "ignore_eos": True}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": MOST}),
}
STOPPED = {"chat": "stop", "completions": "stop", "generate": "stop", "responses": "completed"}

Answer = tuple[str, str, int]
"""Text, reason and number of tokens."""


def ask(server: ApiServer, endpoint: str, **fields: Any) -> str:
    path, body = ENDPOINTS[endpoint]
    status, text = server.request("POST", path, json.dumps(OPTIONS | body | fields).encode())
    assert status == 200, text
    return text


def whole(server: ApiServer, endpoint: str, **fields: Any) -> Answer:
    said = json.loads(ask(server, endpoint, **fields))
    match endpoint:
        case "chat":
            choice = said["choices"][0]
            count = said["usage"]["completion_tokens"]
            return choice["message"]["content"] or "", choice["finish_reason"], count
        case "completions":
            choice = said["choices"][0]
            return choice["text"], choice["finish_reason"], said["usage"]["completion_tokens"]
        case "generate":
            meta = said["meta_info"]
            assert len(said["output_ids"]) == meta["completion_tokens"]
            return said["text"], meta["finish_reason"]["type"], meta["completion_tokens"]
        case "responses":
            return said["output_text"], said["status"], said["usage"]["output_tokens"]
        case _:
            text = "".join(block["text"] for block in said["content"])
            return text, f"{said['stop_reason']} {said['stop_sequence']}", said["usage"]["output_tokens"]


def events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def streamed(server: ApiServer, endpoint: str, **fields: Any) -> Answer:
    options: dict[str, Any] = {"stream": True}
    if endpoint in ("chat", "completions"):
        options["stream_options"] = {"include_usage": True}
    text, reason, count = "", "", 0
    for event in events(ask(server, endpoint, **options | fields)):
        match endpoint:
            case "chat" | "completions":
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or "" if endpoint == "chat" else choice["text"]
                    reason = choice.get("finish_reason") or reason
                count = (event.get("usage") or {}).get("completion_tokens", count)
            case "generate":
                text += event["text"]
                count = event["meta_info"]["completion_tokens"]
                reason = (event["meta_info"]["finish_reason"] or {}).get("type", reason)
            case "responses":
                if event["type"] == "response.output_text.delta":
                    text += event["delta"]
                if event["type"] in ("response.completed", "response.incomplete"):
                    reason = event["response"]["status"]
                    count = event["response"]["usage"]["output_tokens"]
            case _:
                if event["type"] == "content_block_delta":
                    text += event["delta"]["text"]
                if event["type"] == "message_delta":
                    delta = event["delta"]
                    reason = f"{delta['stop_reason']} {delta['stop_sequence']}"
                    count = event["usage"]["output_tokens"]
    return text, reason, count


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_text_before_the_stop(endpoint: str, server: ApiServer):
    """LMDeploy 0.18 itself runs on past every stop that is not exactly one token."""
    field = "stop_sequences" if endpoint == "messages" else "stop"
    free, _, _ = whole(server, endpoint)
    assert streamed(server, endpoint)[0] == free
    assert len(free) > MOST
    for begin, end in ((9, 10), (7, 15), (20, 27), (3, 30)):
        stop = free[begin:end]
        expected = free[: free.index(stop)]
        reason = STOPPED.get(endpoint, f"stop_sequence {stop}")
        answer = whole(server, endpoint, **{field: [stop, "no such text"]})
        assert answer[:2] == (expected, reason)
        assert 0 < answer[2] < MOST or not expected
        assert streamed(server, endpoint, **{field: [stop, "no such text"]}) == answer
        options: dict[str, Any] = {field: [stop], "include_stop_str_in_output": True}
        assert whole(server, endpoint, **options)[0] == expected + stop


def test_logprobs_end_with_the_text(server: ApiServer):
    free, _, _ = whole(server, "chat")
    options = {"stop": [free[10:14]], "logprobs": True, "top_logprobs": 20, "return_token_ids": True}
    (choice,) = json.loads(ask(server, "chat", **options))["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["output_ids"])
    for row in content:
        assert len(row["top_logprobs"]) == 20
        best = row["top_logprobs"][0]
        assert (best["token"], best["bytes"], best["logprob"]) == (row["token"], row["bytes"], row["logprob"])
    said = b"".join(bytes(row["bytes"]) for row in content).decode(errors="ignore")
    assert said.startswith(free[:10].replace("\ufffd", "")[:4])
