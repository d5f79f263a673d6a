"""A prompt that session_len has room for and the KV cache has not: the error speaks of the cache."""

import json
from pathlib import Path

import pytest

from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_the_error_names_the_cache(model: Path):
    """LMDeploy 0.18 itself: "The request exceeds the model context length.", behind a status of 200 where streamed."""
    with ApiServer(model, "--eager-mode", session_len=2048, DLINFER_CPU_KV_CACHE_GIB="0.0005") as server:
        server.ready()
        for stream in (False, True):
            body = {"model": MODEL_NAME, "prompt": "hello " * 700, "max_tokens": 4, "stream": stream}
            status, text = server.request("POST", "/v1/completions", json.dumps(body).encode())
            assert status == 400, text
            message = json.loads(text)["message"]
            assert "the KV cache has room for only" in message, message
            assert "session_len=2048 would allow more" in message
            assert "model context length" not in message
