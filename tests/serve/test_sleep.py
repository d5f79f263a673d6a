"""A server that falls asleep while it answers: after waking up it gives what it gave before."""

import threading
from typing import Any

import pytest

from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ("hello there my friend", "once upon a time")
READERS = 6
ROUNDS = 5
"""Each meets another moment of a step."""


def test_requests_after_a_sleep_get_their_own_tokens(server: ApiServer):
    options: dict[str, Any] = {
        "model": MODEL_NAME,
        "temperature": 0.0,
        "timeout": 60,
        "extra_body": {"ignore_eos": True},
    }
    with server.client() as client:

        def texts() -> list[str]:
            made = [client.completions.create(prompt=one, max_tokens=12, **options) for one in PROMPTS]
            return [one.choices[0].text for one in made]

        def read(begun: threading.Event) -> None:
            stream = client.completions.create(prompt="hello", max_tokens=800, stream=True, **options)
            for _ in stream:
                begun.set()

        wanted = texts()
        for _ in range(ROUNDS):
            begun = [threading.Event() for _ in range(READERS)]
            readers = [threading.Thread(target=read, args=(one,)) for one in begun]
            for reader in readers:
                reader.start()
            assert all(one.wait(60) for one in begun)
            assert server.request("POST", "/sleep?level=1")[0] == 200
            for reader in readers:
                reader.join(60)
                assert not reader.is_alive()
            assert server.request("POST", "/wakeup")[0] == 200
            assert texts() == wanted
