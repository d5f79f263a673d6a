"""The HTTP application: paths, keys, errors in OpenAI's form, and clients that go away."""

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError

from dlinfer.embedding.errors import EmbeddingInputError, EmbeddingQueueError
from dlinfer.embedding.server.metrics import Metrics
from dlinfer.embedding.server.options import Options
from dlinfer.embedding.server.requests import EmbeddingRequest, RerankRequest, ScoreRequest, misfit
from dlinfer.embedding.server.service import Service
from dlinfer.embedding.server.token_queue import TokenQueue
from dlinfer.embedding.text_model import TextModel

logger = logging.getLogger("dlinfer")

_STUCK_SECONDS = 180.0
"""A server whose forward takes longer than this answers /health with 503."""

Answer = Callable[[Any], Coroutine[Any, Any, dict[str, Any]]]


def create_app(model: TextModel, options: Options) -> FastAPI:
    """Return the application that serves ``model``. It computes while its lifespan lasts."""
    metrics = Metrics()
    queue = TokenQueue(model.run, options.batch_tokens, options.queue_tokens, metrics.forward)
    metrics.watch(queue.waiting)
    service = Service(model, queue, options.name, options.matryoshka)
    created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        computing = asyncio.create_task(queue.run())
        yield
        computing.cancel()

    app = FastAPI(title="dlinfer embeddings", lifespan=lifespan)

    def post(kind: type[BaseModel], answer: Answer, *paths: str) -> None:
        async def endpoint(request: Request) -> Response:
            begun = time.monotonic()
            response = _refused_key(request, options) or await _answered(request, kind, answer, service)
            metrics.request(paths[0], response.status_code, time.monotonic() - begun)
            return response

        for path in paths:
            app.add_api_route(path, endpoint, methods=["POST"])

    post(EmbeddingRequest, service.embeddings, "/v1/embeddings")
    post(RerankRequest, service.rerank, "/v1/rerank", "/rerank", "/v2/rerank")
    post(ScoreRequest, service.score, "/v1/score", "/score")

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        entry = {"id": service.name, "object": "model", "created": created, "owned_by": "dlinfer"}
        return _refused_key(request, options) or _json({"object": "list", "data": [entry]})

    @app.get("/health")
    async def health() -> Response:
        stuck = queue.begun is not None and time.monotonic() - queue.begun > _STUCK_SECONDS
        return Response(status_code=503 if stuck else 200)

    @app.get("/metrics")
    async def counters(request: Request) -> Response:
        return _refused_key(request, options) or Response(metrics.text(), media_type="text/plain")

    return app


async def _answered(request: Request, kind: type[BaseModel], answer: Answer, service: Service) -> Response:
    """Return the response to a request. The work ends when the client goes away."""
    try:
        body = kind.model_validate_json(await request.body())
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_context=False)[0]
        field, reason = misfit(first)
        return _error(400, f"{field}: {reason}", field)
    model = getattr(body, "model", None)
    if model not in (None, service.name):
        return _error(
            404, f"The model {model!r} does not exist; /v1/models lists it.", "model", "model_not_found"
        )
    work = asyncio.create_task(answer(body))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return _error(499, "the client has closed the connection")
        return _json(work.result())
    except EmbeddingInputError as error:
        return _error(400, str(error), error.fields["argument"])
    except EmbeddingQueueError as error:
        response = _error(429, str(error), kind="rate_limit_error")
        response.headers["Retry-After"] = str(error.fields["seconds"])
        return response
    except Exception:
        logger.exception("a request to %s failed", request.url.path)
        return _error(
            500, "the server failed to compute this request; its log has the cause", kind="server_error"
        )
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client closes the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused_key(request: Request, options: Options) -> Response | None:
    key = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not options.api_keys or any(
        hmac.compare_digest(key.encode(), valid.encode()) for valid in options.api_keys
    ):
        return None
    return _error(401, "the API key is missing or wrong", kind="authentication_error", code="invalid_api_key")


def _error(
    status: int,
    message: str,
    argument: str | None = None,
    code: str | None = None,
    kind: str = "invalid_request_error",
) -> Response:
    return _json({"error": {"message": message, "type": kind, "param": argument, "code": code}}, status)


def _json(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")
