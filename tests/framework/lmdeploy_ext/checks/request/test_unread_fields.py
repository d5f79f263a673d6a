"""Fields that LMDeploy drops: every one of its protocols is read, served, refused or listed as harmless."""

import inspect
import re
from pathlib import Path
from typing import Any

import lmdeploy
import pytest
from lmdeploy.serve.anthropic.protocol import MessagesRequest
from lmdeploy.serve.core.generation_config import _GENERATION_CONFIG_FIELDS
from lmdeploy.serve.openai import protocol
from lmdeploy.serve.openai.responses.protocol import ResponsesRequest
from lmdeploy.serve.openai.responses.request import warn_ignored_request_fields

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.request.unread_fields import UNREAD, check_fields

REQUESTS: dict[str, Any] = {
    "/v1/chat/completions": protocol.ChatCompletionRequest,
    "/v1/completions": protocol.CompletionRequest,
    "/generate": protocol.GenerateReqInput,
    "/pooling": protocol.PoolingRequest,
    "/abort_request": protocol.AbortRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
HARMLESS = {
    "user",
    "metadata",
    "service_tier",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "stream_options",
    "truncation",
}
"""They change no answer, or none that can be given."""
OURS = {
    "echo",  # answers/completions.py
    "presence_penalty",  # handed on to the chat by unread_fields.py
    "frequency_penalty",
    "reasoning",
}


def sources() -> str:
    """LMDeploy's code behind its protocols, without the function that lists what it ignores."""
    files = Path(lmdeploy.__file__).parent.joinpath("serve").rglob("*.py")
    kept = (file for file in files if file.name != "protocol.py" and "proxy" not in file.parts)
    ignored = inspect.getsource(inspect.unwrap(warn_ignored_request_fields))
    return "\n".join(file.read_text() for file in kept).replace(ignored, "")


@pytest.mark.parametrize("path", REQUESTS)
def test_no_field_is_dropped_in_silence(path: str):
    code = sources()
    for field in REQUESTS[path].model_fields:
        read = re.search(rf"(request|req)\.{field}\b", code) or field in _GENERATION_CONFIG_FIELDS
        assert read or field in HARMLESS | OURS | set(UNREAD[path]), field


CASES = [(path, field) for path, fields in UNREAD.items() for field in fields]


@pytest.mark.parametrize(("path", "field"), CASES, ids=str)
def test_neutral_values_are_taken_and_others_are_not(path: str, field: str):
    for value in (None, *UNREAD[path][field]):
        check_fields(path, {field: value})
    with pytest.raises(UnsupportedFeatureError, match=re.escape(f"{field}=")):
        check_fields(path, {field: ["anything"]})


def test_a_number_may_be_written_as_another_type():
    check_fields("/v1/chat/completions", {"length_penalty": 1.0, "min_tokens": 0.0})
    with pytest.raises(UnsupportedFeatureError):
        check_fields("/v1/chat/completions", {"min_tokens": True})


def test_best_of_as_many_as_are_returned():
    check_fields("/v1/completions", {"best_of": 3, "n": 3})
    with pytest.raises(UnsupportedFeatureError, match="best_of"):
        check_fields("/v1/completions", {"best_of": 3, "n": 2})


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "xhigh"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "low"}, "text": {"verbosity": "medium"}}, None),
    ],
)
def test_fields_inside_fields(body: dict[str, Any], named: str | None):
    if named is None:
        check_fields("/v1/responses", body)
        return
    with pytest.raises(UnsupportedFeatureError, match=named):
        check_fields("/v1/responses", body)
