"""How many requests a server holds, and how long each may take, with a plain ASGI application as the server."""

import asyncio
import json

import pytest

pytest.importorskip("lmdeploy")

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.checks.request.limits import Limits

CHAT = "/v1/chat/completions"
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


class Client:
    """Sends requests to an application behind limits, and keeps what it answers."""

    def __init__(self, answer, limits=None):
        self.limits, self.answer, self.cancelled = limits or Limits(), answer, False

    async def app(self, scope, receive, send):
        try:
            await self.answer(send)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def ask(self, path=CHAT, method="POST", **headers):
        sent = []

        async def send(message):
            sent.append(message)

        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": named}
        await self.limits.run(self.app, scope, None, send)
        start = sent[0]
        answered = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return start["status"], answered, b"".join(message.get("body", b"") for message in sent[1:]), sent[-1]


async def start(send, headers=STREAM):
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": encoded})


async def at_once(send):
    await start(send)
    await send({"type": "http.response.body", "body": b"done"})


async def never(send):
    await asyncio.sleep(1000)


async def begins(send):
    await start(send)
    await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    await asyncio.sleep(1000)


def test_without_limits_requests_pass():
    assert asyncio.run(Client(at_once).ask())[:3] == (200, STREAM, b"done")


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/generate"])
def test_one_request_too_many_is_refused_at_once_and_others_go_on(path):
    async def main():
        release = asyncio.Event()

        async def waits(send):
            await release.wait()
            await at_once(send)

        client = Client(waits)
        with settings.override(max_requests=2):
            held = [asyncio.create_task(client.ask()) for _ in range(2)]
            await asyncio.sleep(0)
            status, headers, body, _ = await client.ask(path)
            health = asyncio.create_task(client.ask("/health", method="GET"))
            release.set()
            answers = await asyncio.gather(*held)
            again = await client.ask(path)
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 60
        assert b"DLINFER_MAX_REQUESTS" in body
        assert [answer[0] for answer in answers] == [200, 200]
        assert (await health)[0] == 200 and again[0] == 200

    asyncio.run(main())


def test_requests_that_fail_make_room():
    async def fails(send):
        raise ZeroDivisionError

    async def main():
        client = Client(fails)
        with settings.override(max_requests=1):
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    await client.ask()

    asyncio.run(main())


@pytest.mark.parametrize(("server", "own"), [(0.05, None), (None, "0.05"), (100.0, "0.05"), (0.05, "100")])
def test_a_late_answer_is_a_504(server, own):
    client = Client(never)
    with settings.override(request_seconds=server):
        status, _, body, _ = asyncio.run(client.ask(**({"x_request_timeout": own} if own else {})))
    assert status == 504 and "0.05 s" in json.loads(body)["message"] and client.cancelled


def test_an_answer_that_a_cancellation_cut_short_is_no_success():
    async def gives_up(send):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await at_once(send)

    status, _, body, _ = asyncio.run(Client(gives_up).ask(x_request_timeout="0.05"))
    assert status == 504 and b"done" not in body


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf"])
def test_a_header_that_is_no_time_is_no_limit(text):
    assert asyncio.run(Client(at_once).ask(x_request_timeout=text))[0] == 200


@pytest.mark.parametrize(
    ("path", "event"),
    [(CHAT, b'data: {"error": {'), ("/v1/messages", b'event: error\ndata: {"type": "error"')],
)
def test_a_stream_that_is_late_ends_with_an_error(path, event):
    client = Client(begins)
    status, _, body, last = asyncio.run(client.ask(path, x_request_timeout="0.05"))
    assert status == 200 and client.cancelled
    first, said = body.split(b"\n\n", 1)
    assert first == b"data: {}" and said.startswith(event) and b"0.05 s" in said and b"[DONE]" not in said
    assert not last.get("more_body")


def test_an_application_s_own_timeout_stays_its_own():
    async def fails(send):
        raise TimeoutError("a database")

    with pytest.raises(TimeoutError, match="a database"):
        asyncio.run(Client(fails).ask(x_request_timeout="100"))
