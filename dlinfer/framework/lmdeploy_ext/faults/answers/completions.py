"""``POST /v1/completions`` with all choices, prompts and log-probabilities of its protocol.

LMDeploy 0.18 serves one choice a prompt, streams prompts one after another, all of them as choice 0, returns no
log-probabilities, and drops ``echo``.
"""

import asyncio
import codecs
import json
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.request.prompts import refusal
from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.answers.token_text import text_of
from dlinfer.framework.patching import Original


@dataclass
class _Choice:
    """One text of the reply: a prompt and its continuation."""

    index: int
    prompt: Any  # a string or token ids
    session: Any
    answers: Any = None  # LMDeploy's generator
    input_tokens: int = 0
    echo: "_Piece | None" = None
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    offset: int = 0


@dataclass
class _Piece:
    """A part of a choice's text. The first token of a prompt has no log-probability."""

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Any] | None = None
    finish_reason: Any = None  # a word of the protocol, or None
    generated: int = 0
    cached: int = 0


_UNDECLARED = ("stop_token_ids", "min_new_tokens", "include_stop_str_in_output")
"""Fields that LMDeploy's protocol has for its other endpoints."""


class _Completion:
    """One request: its choices, generated at the same time, and the engine's sessions, closed once."""

    def __init__(self, request: Any, body: dict[str, Any], server_context: Any) -> None:
        self.request = request
        self._more = {name: body[name] for name in _UNDECLARED if body.get(name) is not None}
        self._shows_ids = bool(body.get("return_token_ids"))
        self.context = server_context
        self.engine = server_context.async_engine
        self.tokenizer = self.engine.tokenizer.model.model
        self.choices: list[_Choice] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pieces: asyncio.Queue[tuple[_Choice, _Piece | Exception | None]] = asyncio.Queue(maxsize=256)

    async def prepare(self) -> None:
        """Open sessions and check all prompts. Raises RequestError, after which nothing is left open."""
        request = self.request
        prompts = request.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        own = request.session_id if len(prompts) * (request.n or 1) == 1 else None
        try:
            await _all(self._prepare(prompt, number, own) for number, prompt in enumerate(prompts))
        except BaseException:
            await self.close()
            raise
        self.choices.sort(key=lambda choice: choice.index)

    async def _prepare(self, prompt: Any, number: int, own_session: int | None) -> None:
        """Add the choices of one prompt."""
        request = self.request
        count = request.n or 1
        choices = [
            _Choice(number * count + copy, prompt, self.context.create_session(own_session))
            for copy in range(count)
        ]
        self.choices += choices
        echo = await self._echo(prompt) if request.echo else None
        for copy, choice in enumerate(choices):
            choice.echo = echo
            if echo is not None and _most_tokens(request) == 0:
                choice.input_tokens = len(self._ids(prompt))
                continue
            config = self._config()
            if request.seed is not None:
                config.random_seed = (request.seed + copy) % (1 << 64)
            prepared = await self._preprocess(prompt, choice.session, config)
            choice.input_tokens = prepared.input_token_len
            choice.answers = self.engine.generate(prepared, stream_response=True)

    def _config(self, **changed: Any) -> Any:
        from lmdeploy.serve.openai.endpoints.common import build_serving_generation_config

        request = self.request
        stop = [request.stop] if isinstance(request.stop, str) else request.stop
        own = {
            "stop_words": stop,
            "random_seed": request.seed,
            "logprobs": request.logprobs,
            "n": 1,
        }
        own |= self._more | changed
        return build_serving_generation_config(request, self.context, **own)

    async def _preprocess(self, prompt: Any, session: Any, config: Any) -> Any:
        text = isinstance(prompt, str)
        return await self.engine.preprocess(
            prompt if text else None,
            session,
            gen_config=config,
            do_preprocess=False,
            adapter_name=None if self.request.model == self.engine.model_name else self.request.model,
            input_ids=None if text else list(prompt),
        )

    async def _echo(self, prompt: Any) -> _Piece:
        """The prompt as the first piece of a text, with its log-probabilities where they are asked for."""
        from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

        ids = self._ids(prompt)
        if not isinstance(prompt, str):
            vocab_size = getattr(self.engine.hf_cfg.get_text_config(), "vocab_size", None)
            if (reason := refusal(ids, vocab_size)) is not None:
                raise RequestError(ErrorCode.INVALID_REQUEST, reason)
        echo = _Piece(prompt if isinstance(prompt, str) else self.engine.tokenizer.decode(ids))
        if self.request.logprobs is not None and ids:
            echo.token_ids = ids
            echo.logprobs = [None, *await self._score(prompt, len(ids))]
        return echo

    def _ids(self, prompt: Any) -> list[int]:
        return self.engine.tokenizer.encode(prompt, add_bos=True) if isinstance(prompt, str) else list(prompt)

    async def _score(self, prompt: Any, length: int) -> Sequence[Any]:
        """Log-probabilities of a prompt's tokens but the first."""
        if length < 2:
            return []
        config = self._config(logprobs=max(self.request.logprobs, 1), logprob_start_len=0, stop_words=None)
        config.max_new_tokens, config.min_new_tokens = 0, None
        prepared = await self._preprocess(prompt, self.context.create_session(), config)
        rows: Sequence[Any] = []
        async for answer in self.engine.generate(prepared, stream_response=True):
            rows = answer.logprobs or rows
        return rows

    async def pieces(self) -> AsyncIterator[tuple[_Choice, _Piece]]:
        """Pieces of all choices as they come. Raises the first error of one."""
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in self.choices]
        running = len(self._tasks)
        while running:
            choice, piece = await self._pieces.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                running -= 1
            else:
                yield choice, piece

    async def _run(self, choice: _Choice) -> None:
        try:
            if choice.echo is not None:
                await self._pieces.put((choice, choice.echo))
            if choice.answers is None:  # the prompt alone
                await self._pieces.put((choice, _Piece("", finish_reason="length")))
            async for answer in choice.answers or _nothing():
                piece = _Piece(
                    answer.response,
                    answer.token_ids or (),
                    answer.logprobs,
                    answer.finish_reason,
                    answer.generate_token_len,
                    answer.cached_tokens,
                )
                await self._pieces.put((choice, piece))
        except Exception as error:  # noqa: BLE001 - raised again where the pieces are read
            await self._pieces.put((choice, error))
        else:
            await self._pieces.put((choice, None))

    async def close(self) -> None:
        """End what still runs. May be called again."""
        from lmdeploy.serve.utils.request_cleanup import cleanup_result_generators

        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        generators = [choice.answers for choice in self.choices if choice.answers is not None]
        sessions = [choice.session for choice in self.choices]
        await cleanup_result_generators(generators, sessions, self.context.session_manager)

    def output_ids(self, choice: _Choice, piece: _Piece) -> dict[str, list[int]]:
        """Generated tokens of a piece under the name that LMDeploy's chats give them, if they are asked for."""
        if not self._shows_ids:
            return {}
        return {"output_ids": [] if piece is choice.echo else list(piece.token_ids)}

    def logprobs(self, choice: _Choice, piece: _Piece) -> Any:
        """The protocol's log-probabilities of a piece, or None."""
        from lmdeploy.serve.openai.protocol import LogProbs

        if self.request.logprobs is None or piece.logprobs is None:
            return None
        count = self.request.logprobs
        said = LogProbs(top_logprobs=[])
        assert said.top_logprobs is not None
        for token, row in zip(piece.token_ids, piece.logprobs, strict=True):
            text, raw = text_of(self.tokenizer, token)
            said.tokens.append(text)
            unfinished = choice.decoder.getstate()[0] and raw[:1] and raw[0] & 0xC0 != 0x80
            said.text_offset.append(choice.offset + bool(unfinished))  # behind one replacement character
            choice.offset += len(choice.decoder.decode(raw))
            if row is None:
                said.token_logprobs.append(None)
                said.top_logprobs.append(None)
                continue
            said.token_logprobs.append(row[token])
            shown = sorted(row.items(), key=lambda item: -item[1])[:count]
            if shown and token not in dict(shown):
                shown.append((token, row[token]))  # the protocol's "up to logprobs + 1"
            said.top_logprobs.append({text_of(self.tokenizer, other)[0]: value for other, value in shown})
        return said


@corrects(
    "lmdeploy.serve.openai.endpoints.completions:register",
    why="one choice, no log-probabilities, no echo, and the index 0 for every prompt of a streamed list",
)
def _register(original: Original, router: Any, server_context: Any) -> None:
    from fastapi import Depends, Request
    from lmdeploy.serve.core.exceptions import RequestError
    from lmdeploy.serve.openai.endpoints.common import validate_request
    from lmdeploy.serve.openai.endpoints.completions import check_request
    from lmdeploy.serve.openai.errors import create_request_error_response
    from lmdeploy.serve.openai.protocol import CompletionRequest
    from lmdeploy.serve.utils.server_utils import validate_json_request
    from lmdeploy.serve.utils.streaming_response import ManagedStreamingResponse

    @router.post("/v1/completions", dependencies=[Depends(validate_json_request)])
    async def completions_v1(request: CompletionRequest, raw_request: Request) -> Any:
        """Continue prompts, as OpenAI's completions API does."""
        refused = validate_request(request, server_context, check_request)
        if refused is not None:
            return refused
        completion = _Completion(request, await raw_request.json(), server_context)
        try:
            await completion.prepare()
        except RequestError as error:
            return create_request_error_response(error)
        if request.stream:
            events = _events(completion)
            return ManagedStreamingResponse(
                events, cleanup_callbacks=[completion.close], media_type="text/event-stream"
            )
        try:
            return await _whole(completion, raw_request)
        except RequestError as error:
            return create_request_error_response(error)
        finally:
            await asyncio.shield(asyncio.ensure_future(completion.close()))


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Wait for all, then raise the first error."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _nothing() -> AsyncIterator[Any]:
    return
    yield


def _most_tokens(request: Any) -> int | None:
    """How many tokens a request asks for at most."""
    fields = request.model_dump(include={"max_completion_tokens", "max_tokens"})
    most = fields["max_completion_tokens"]
    return fields["max_tokens"] if most is None else most


def _head(request: Any) -> dict[str, Any]:
    import shortuuid

    return {"id": f"cmpl-{shortuuid.random()}", "created": int(time.time()), "model": request.model}


async def _events(completion: _Completion) -> AsyncIterator[str]:
    """Server-sent events of a streamed reply."""
    from lmdeploy.serve.core.exceptions import RequestError
    from lmdeploy.serve.openai.errors import request_error_payload
    from lmdeploy.serve.openai.protocol import CompletionResponseStreamChoice, CompletionStreamResponse

    request = completion.request
    head = _head(request)
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    last: dict[int, _Piece] = {}
    try:
        async for choice, piece in completion.pieces():
            last[choice.index] = piece
            said = CompletionResponseStreamChoice(
                index=choice.index,
                text=piece.text,
                finish_reason=piece.finish_reason,
                logprobs=completion.logprobs(choice, piece),
            )
            event = CompletionStreamResponse(**head, choices=[said]).model_dump(
                mode="json", exclude_none=True
            )
            event["choices"][0] |= completion.output_ids(choice, piece)
            if include_usage:
                event["usage"] = None
            yield f"data: {json.dumps(event)}\n\n"
    except RequestError as error:
        yield f"data: {json.dumps({'error': request_error_payload(error)})}\n\n"
    else:
        if include_usage:
            usage = _usage(completion, last)
            event = CompletionStreamResponse(**head, choices=[], usage=usage)
            yield f"data: {json.dumps(event.model_dump(mode='json', exclude_none=True))}\n\n"
    yield "data: [DONE]\n\n"


async def _whole(completion: _Completion, raw_request: Any) -> Any:
    """The reply with all choices at once."""
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
    from lmdeploy.serve.openai.protocol import CompletionResponse, CompletionResponseChoice, LogProbs

    texts: dict[int, list[str]] = {choice.index: [] for choice in completion.choices}
    rows: dict[int, list[Any]] = {choice.index: [] for choice in completion.choices}
    ids: dict[int, dict[str, list[int]]] = {choice.index: {} for choice in completion.choices}
    last: dict[int, _Piece] = {}
    async for choice, piece in completion.pieces():
        if await raw_request.is_disconnected():
            raise RequestError(ErrorCode.REQUEST_CANCELLED, "Client disconnected")
        last[choice.index] = piece
        texts[choice.index].append(piece.text)
        for name, tokens in completion.output_ids(choice, piece).items():
            ids[choice.index].setdefault(name, []).extend(tokens)
        said = completion.logprobs(choice, piece)
        if said is not None:
            rows[choice.index].append(said)
    choices = []
    for index, parts in texts.items():
        joined = None
        if completion.request.logprobs is not None:
            joined = LogProbs(top_logprobs=[top for said in rows[index] for top in said.top_logprobs])
            for name in ("tokens", "token_logprobs", "text_offset"):
                setattr(joined, name, [item for said in rows[index] for item in getattr(said, name)])
        choices.append(
            CompletionResponseChoice(
                index=index, text="".join(parts), finish_reason=last[index].finish_reason, logprobs=joined
            )
        )
    head = _head(completion.request)
    response = CompletionResponse(**head, choices=choices, usage=_usage(completion, last)).model_dump()
    for said in response["choices"]:
        said.update(ids[said["index"]])
    return response


def _usage(completion: _Completion, last: dict[int, _Piece]) -> Any:
    """Prompts are counted once, however many choices continue them."""
    from lmdeploy.serve.openai.protocol import UsageInfo

    count = completion.request.n or 1
    firsts = [choice for choice in completion.choices if choice.index % count == 0]
    return UsageInfo.build(
        prompt_tokens=sum(choice.input_tokens for choice in firsts),
        completion_tokens=sum(piece.generated for piece in last.values()),
        cached_tokens=sum(last[choice.index].cached for choice in firsts if choice.index in last),
    )
