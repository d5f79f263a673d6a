"""A server in place of LMDeploy's, whose answers are known: ``python -m benchmarks.routers.stub PORT [HOST]``.

The last message of a request may end with ``TASK`` and JSON that says what to do: ``tokens``, ``delay`` (seconds a
token), ``id``, and ``status``, an error to answer with. Routers pass on the text of messages. The server keeps the
conversations that it saw last, as a prefix cache does, and counts the messages that it finds there.
"""

import asyncio
import json
import sys
from collections import OrderedDict
from typing import Any

from aiohttp import web

ERRORS = {
    status: json.dumps({"message": f"error {status}", "object": "error", "param": None, "code": status})
    for status in (400, 404, 422, 429, 500, 503)
}
CACHED_PREFIXES = 400


class Stub:
    """One server. A prefix is the first messages of a conversation; the cache drops the one used least lately."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.prefixes: OrderedDict[str, None] = OrderedDict()
        self.found = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body: dict[str, Any] = json.loads(raw) if raw else {}
        task: dict[str, Any] = _task(body.get("messages") or [])
        if status := task.get("status"):
            return web.Response(status=status, text=ERRORS[status], content_type="application/json")
        self._look_up(body.get("messages") or [])
        text = " ".join(f"{task.get('id', 0)}.{token}" for token in range(task.get("tokens", 1)))
        if body.get("stream"):
            return await self._stream(request, text, task.get("delay", 0))
        await asyncio.sleep(task.get("tokens", 1) * task.get("delay", 0))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        what = {"id": "stub", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
        facts = {
            "port": self.port,
            "body": body,
            "version": request.headers.get("anthropic-version"),
        }
        return web.json_response(what | facts)

    async def _stream(self, request: web.Request, text: str, delay: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = {"id": "stub", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
        words = text.split(" ")
        for at, word in enumerate(words):
            last = at == len(words) - 1
            choice = {
                "index": 0,
                "delta": {"content": word + " " * (not last)},
                "finish_reason": "stop" if last else None,
            }
            await response.write(f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n".encode())
            await asyncio.sleep(delay)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _look_up(self, messages: list[dict[str, str]]) -> None:
        keys = [json.dumps(messages[: count + 1]) for count in range(len(messages))]
        self.found += next(
            (count for count in range(len(keys), 0, -1) if keys[count - 1] in self.prefixes), 0
        )
        for key in keys:
            self.prefixes[key] = None
            self.prefixes.move_to_end(key)
        while len(self.prefixes) > CACHED_PREFIXES:
            self.prefixes.popitem(last=False)

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": "tiny", "object": "model", "created": 1, "owned_by": "lmdeploy"}
        return web.json_response({"object": "list", "data": [model]})

    async def count(self, _: web.Request) -> web.Response:
        return web.json_response({"found": self.found})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"# TYPE stub_prefixes_found gauge\nstub_prefixes_found {self.found}\n")

    async def forget(self, _: web.Request) -> web.Response:
        self.prefixes.clear()
        self.found = 0
        return web.json_response({})


def _task(messages: list[dict[str, str]]) -> dict[str, Any]:
    _, _, text = messages[-1]["content"].partition("TASK") if messages else ("", "", "")
    return json.loads(text or "{}")


def main() -> None:
    port = int(sys.argv[1])
    stub = Stub(port)
    app = web.Application(client_max_size=64 << 20)
    app.add_routes(
        [
            web.get("/v1/models", stub.models),
            web.get("/health", stub.models),
            web.get("/count", stub.count),
            web.get("/metrics", stub.metrics),
            web.get("/forget", stub.forget),
            web.route("*", "/{path:.*}", stub.answer),
        ]
    )
    host = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"
    web.run_app(app, host=host, port=port, reuse_address=True, print=lambda *_: None, access_log=None)


if __name__ == "__main__":
    main()
