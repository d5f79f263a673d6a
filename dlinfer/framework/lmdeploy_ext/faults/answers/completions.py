"""Serve ``POST /v1/completions`` with all the choices, prompts and log-probabilities that its protocol defines.

LMDeploy 0.18 serves one choice for each prompt, and ignores ``echo`` and log-probabilities. If a streamed request has
several prompts, LMDeploy answers the prompts one after another, and numbers every answer as choice 0.
"""

import asyncio
import codecs
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.request.prompts import refusal
from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.answers.token_text import text_of
from dlinfer.framework.patching import Original


@dataclass
class _Choice:
    """One choice of the reply: the continuation of a prompt, and the prompt itself if the request asks for ``echo``."""

    index: int
    prompt: Any  # a string or token ids
    session: Any
    answers: Any = None  # LMDeploy's generator of GenOut
    echo: Any = None  # the prompt, as a GenOut
    input_tokens: int = 0
    generated: int = 0
    cached: int = 0
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    offset: int = 0


_UNDECLARED = ("stop_token_ids", "min_new_tokens", "include_stop_str_in_output")
"""Request fields that LMDeploy's protocol declares for other endpoints, but not for ``/v1/completions``."""


class _Completion:
    """A completion request. All its choices are generated at the same time, each in its own engine session."""

    def __init__(self, request: Any, body: dict[str, Any], server_context: Any) -> None:
        self.request = request
        self._undeclared = {name: body[name] for name in _UNDECLARED if body.get(name) is not None}
        self.shows_ids = bool(body.get("return_token_ids"))
        self.context = server_context
        self.engine = server_context.async_engine
        self.tokenizer = self.engine.tokenizer.model.model
        self.choices: list[_Choice] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._answers: asyncio.Queue[tuple[_Choice, Any]] = asyncio.Queue(maxsize=256)

    async def prepare(self) -> None:
        """Open a session for each choice, and check all prompts. If a check fails, close all sessions."""
        request = self.request
        prompts = request.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        own = request.session_id if len(prompts) * (request.n or 1) == 1 else None
        work = (self._prepare(prompt, number, own) for number, prompt in enumerate(prompts))
        try:
            for result in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self.close()
            raise
        self.choices.sort(key=lambda choice: choice.index)

    async def _prepare(self, prompt: Any, number: int, own_session: int | None) -> None:
        """Add the choices of one prompt. number: the prompt's index in the request.

        own_session: the session id that the request asks for, if the whole request has a single choice; else None.
        """
        request = self.request
        count = request.n or 1
        choices = [
            _Choice(number * count + copy, prompt, self.context.create_session(own_session))
            for copy in range(count)
        ]
        self.choices += choices
        echo = await self._echo(prompt) if request.echo else None
        limits = request.model_dump(include={"max_completion_tokens", "max_tokens"})
        most = limits["max_completion_tokens"]
        for copy, choice in enumerate(choices):
            choice.echo = echo
            if echo is not None and (limits["max_tokens"] if most is None else most) == 0:
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
        own = {"stop_words": stop, "random_seed": request.seed, "logprobs": request.logprobs, "n": 1}
        own |= self._undeclared | changed
        return build_serving_generation_config(request, self.context, **own)

    async def _preprocess(self, prompt: Any, session: Any, config: Any) -> Any:
        is_text = isinstance(prompt, str)
        return await self.engine.preprocess(
            prompt if is_text else None,
            session,
            gen_config=config,
            do_preprocess=False,
            adapter_name=None if self.request.model == self.engine.model_name else self.request.model,
            input_ids=None if is_text else list(prompt),
        )

    async def _echo(self, prompt: Any) -> Any:
        """Return the prompt as a GenOut to send before the answer, with log-probabilities if the request wants them."""
        from lmdeploy.serve.core.async_engine import GenOut
        from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

        ids = self._ids(prompt)
        if not isinstance(prompt, str):
            vocab_size = getattr(self.engine.hf_cfg.get_text_config(), "vocab_size", None)
            if (reason := refusal(ids, vocab_size)) is not None:
                raise RequestError(ErrorCode.INVALID_REQUEST, reason)
        echo: Any = GenOut(prompt if isinstance(prompt, str) else self.engine.tokenizer.decode(ids), 0, 0)
        if self.request.logprobs is not None and ids:
            echo.token_ids = ids
            echo.logprobs = [None, *await self._score(prompt, len(ids))]
        return echo

    def _ids(self, prompt: Any) -> list[int]:
        return self.engine.tokenizer.encode(prompt, add_bos=True) if isinstance(prompt, str) else list(prompt)

    async def _score(self, prompt: Any, length: int) -> Sequence[Any]:
        """Return the log-probabilities of a prompt's tokens except the first. length: the prompt's length in tokens."""
        if length < 2:
            return []
        config = self._config(logprobs=max(self.request.logprobs, 1), logprob_start_len=0, stop_words=None)
        config.max_new_tokens, config.min_new_tokens = 0, None
        prepared = await self._preprocess(prompt, self.context.create_session(), config)
        rows: Sequence[Any] = []
        async for answer in self.engine.generate(prepared, stream_response=True):
            rows = answer.logprobs or rows
        return rows

    async def parts(self) -> AsyncIterator[tuple[Any, list[int]]]:
        """Yield (CompletionResponseStreamChoice, new token ids) for each engine output of each choice.

        The outputs come in the order of their arrival. The list of token ids is empty for an echoed prompt. If a choice
        fails, this generator raises the choice's error.
        """
        from lmdeploy.serve.openai.protocol import CompletionResponseStreamChoice

        self._tasks = [asyncio.create_task(self._run(choice)) for choice in self.choices]
        running = len(self._tasks)
        while running:
            choice, answer = await self._answers.get()
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                running -= 1
                continue
            choice.generated, choice.cached = answer.generate_token_len, answer.cached_tokens
            yield (
                CompletionResponseStreamChoice(
                    index=choice.index,
                    text=answer.response,
                    finish_reason=answer.finish_reason,
                    logprobs=self._logprobs(choice, answer),
                ),
                [] if answer is choice.echo else list(answer.token_ids or ()),
            )

    async def _run(self, choice: _Choice) -> None:
        """Put each answer of a choice into the queue; at the end put None, or the error that ended the choice."""
        from lmdeploy.serve.core.async_engine import GenOut

        try:
            if choice.echo is not None:
                await self._answers.put((choice, choice.echo))
            if choice.answers is None:  # echo without new tokens
                await self._answers.put((choice, GenOut("", 0, 0, "length")))
            else:
                async for answer in choice.answers:
                    await self._answers.put((choice, answer))
        except Exception as error:  # noqa: BLE001 - raised again where the answers are read
            await self._answers.put((choice, error))
        else:
            await self._answers.put((choice, None))

    async def close(self) -> None:
        """Cancel the choices that still run, and release all sessions. It may be called twice."""
        from lmdeploy.serve.utils.request_cleanup import cleanup_result_generators

        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        generators = [choice.answers for choice in self.choices if choice.answers is not None]
        sessions = [choice.session for choice in self.choices]
        await cleanup_result_generators(generators, sessions, self.context.session_manager)

    def _logprobs(self, choice: _Choice, answer: Any) -> Any:
        """Return the protocol's LogProbs of an engine output; None if the request wants none or the output has none."""
        from lmdeploy.serve.openai.protocol import LogProbs

        count = self.request.logprobs
        if count is None or answer.logprobs is None:
            return None
        tops: list[dict[str, float] | None] = []
        said = LogProbs(top_logprobs=tops)
        for token, row in zip(answer.token_ids or (), answer.logprobs, strict=True):
            text, raw = text_of(self.tokenizer, token)
            said.tokens.append(text)
            unfinished = choice.decoder.getstate()[0] and raw[:1] and raw[0] & 0xC0 != 0x80
            said.text_offset.append(choice.offset + bool(unfinished))  # a replacement character comes first
            choice.offset += len(choice.decoder.decode(raw))
            if row is None:  # the first token of a prompt
                said.token_logprobs.append(None)
                tops.append(None)
                continue
            said.token_logprobs.append(row[token])
            shown = dict(sorted(row.items(), key=lambda item: -item[1])[:count])
            if shown:
                shown.setdefault(token, row[token])  # the protocol's "up to logprobs + 1"
            tops.append({text_of(self.tokenizer, other)[0]: value for other, value in shown.items()})
        said.top_logprobs = tops
        return said

    def usage(self) -> Any:
        """Return the protocol's token counts. The tokens of a prompt with several choices count once."""
        from lmdeploy.serve.openai.protocol import UsageInfo

        firsts = [choice for choice in self.choices if choice.index % (self.request.n or 1) == 0]
        return UsageInfo.build(
            prompt_tokens=sum(choice.input_tokens for choice in firsts),
            completion_tokens=sum(choice.generated for choice in self.choices),
            cached_tokens=sum(choice.cached for choice in firsts),
        )


@corrects(
    "lmdeploy.serve.openai.endpoints.completions:register",
    why="serves one choice for each prompt, no log-probabilities and no echo, and streams every prompt of a list as "
    "choice 0",
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
            if request.stream:
                return ManagedStreamingResponse(
                    _events(completion), cleanup_callbacks=[completion.close], media_type="text/event-stream"
                )
            try:
                return await _whole(completion, raw_request)
            finally:
                await asyncio.shield(completion.close())
        except RequestError as error:
            return create_request_error_response(error)


def _head(request: Any) -> dict[str, Any]:
    import shortuuid

    return {"id": f"cmpl-{shortuuid.random()}", "created": int(time.time()), "model": request.model}


async def _events(completion: _Completion) -> AsyncIterator[str]:
    from lmdeploy.serve.core.exceptions import RequestError
    from lmdeploy.serve.openai.errors import request_error_payload
    from lmdeploy.serve.openai.protocol import CompletionStreamResponse

    options = completion.request.stream_options
    include_usage = bool(options and options.include_usage)
    head = _head(completion.request)

    def response(**fields: Any) -> dict[str, Any]:
        return CompletionStreamResponse(**head, **fields).model_dump(mode="json", exclude_none=True)

    try:
        async for part, ids in completion.parts():
            event = response(choices=[part])
            if completion.shows_ids:
                event["choices"][0]["output_ids"] = ids
            if include_usage:
                event["usage"] = None
            yield f"data: {json.dumps(event)}\n\n"
    except RequestError as error:
        yield f"data: {json.dumps({'error': request_error_payload(error)})}\n\n"
    else:
        if include_usage:
            yield f"data: {json.dumps(response(choices=[], usage=completion.usage()))}\n\n"
    yield "data: [DONE]\n\n"


async def _whole(completion: _Completion, raw_request: Any) -> Any:
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError
    from lmdeploy.serve.openai.protocol import CompletionResponse, CompletionResponseChoice, LogProbs

    choices = {c.index: CompletionResponseChoice(index=c.index, text="") for c in completion.choices}
    output_ids: dict[int, list[int]] = {index: [] for index in choices}
    if completion.request.logprobs is not None:
        for choice in choices.values():
            choice.logprobs = LogProbs(top_logprobs=[])
    async for part, ids in completion.parts():
        if await raw_request.is_disconnected():
            raise RequestError(ErrorCode.REQUEST_CANCELLED, "Client disconnected")
        choice = choices[part.index]
        choice.text += part.text
        choice.finish_reason = part.finish_reason
        for name in LogProbs.model_fields if part.logprobs is not None else ():
            getattr(choice.logprobs, name).extend(getattr(part.logprobs, name))
        output_ids[part.index] += ids
    usage = completion.usage()
    response = CompletionResponse(
        **_head(completion.request), choices=list(choices.values()), usage=usage
    ).model_dump()
    if completion.shows_ids:
        for said in response["choices"]:
            said["output_ids"] = output_ids[said["index"]]
    return response
