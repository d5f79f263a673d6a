"""Make the text of an answer depend only on its tokens, and end it before the first stop string.

LMDeploy 0.18 detokenises tokens in batches. A batch holds all tokens that have arrived by the time its event loop reads
them. If a batch ends inside a character, the text of the whole batch is lost. LMDeploy also drops stop strings of
several tokens, with a warning. Here tokens are detokenised one by one, and stop strings are searched for in the text.
"""

import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from dlinfer.errors import GenerationOptionError
from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.answers.forbidden_text import forbid
from dlinfer.framework.lmdeploy_ext.faults.answers.logprobs import Ranked
from dlinfer.framework.lmdeploy_ext.faults.answers.stop_text import StopText
from dlinfer.framework.patching import Original


@dataclasses.dataclass
class _Progress:
    """The state of one request, shared by the async generators of this module.

    more: whether further tokens of the current engine output follow.
    stopped: whether a stop string has ended the answer, so that the engine need not compute further tokens.
    """

    more: bool = False
    stopped: bool = False


_PROGRESS = "_dlinfer_progress"
"""Attribute of LMDeploy's Session that holds the _Progress of the session's current request."""


@corrects(
    "lmdeploy.serve.core.async_engine:AsyncEngine.safe_run",
    why="passes on the tokens of several steps as one output, so the text depends on the number of these steps",
)
@asynccontextmanager
async def _safe_run(
    original: Original, self: Any, handle: Any, session: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    async with original(self, handle, session, **kwargs) as outputs:
        progress = vars(session).pop(_PROGRESS, None)
        if progress is None:  # a request for scores or logits reads no text
            yield outputs
        else:
            yield _one_by_one(outputs, progress, handle, session.session_id)


async def _one_by_one(outputs: Any, progress: _Progress, handle: Any, session_id: int) -> AsyncIterator[Any]:
    from lmdeploy.messages import ResponseType

    async for output in outputs:
        pieces = list(_split(output)) if len(output.token_ids) > 1 else [output]
        for number, piece in enumerate(pieces, 1):
            progress.more = number < len(pieces)
            yield piece
            if progress.stopped:
                if output.status is ResponseType.SUCCESS:
                    await handle.async_cancel(session_id)
                    async for _ in outputs:  # until the engine has freed the sequence
                        pass
                # LMDeploy counts this as a request that ended normally.
                yield dataclasses.replace(piece, status=ResponseType.FINISH, token_ids=[], logprobs=None)
                return


def _split(output: Any) -> Iterator[Any]:
    """Split an engine output into outputs of one token. The last one also gets the fields that describe all tokens."""
    from lmdeploy.messages import ResponseType

    metrics = output.req_metrics
    if metrics is not None:
        metrics = dataclasses.replace(metrics, engine_events=[], spec_info=None)
    of_whole = ("logits", "last_hidden_state", "cache_block_ids", "routed_experts", "ce_loss")
    bare = dict.fromkeys(of_whole) | {"status": ResponseType.SUCCESS, "req_metrics": metrics}
    last = len(output.token_ids) - 1
    for index, token in enumerate(output.token_ids):
        rows = None if output.logprobs is None else output.logprobs[index : index + 1]
        changed: dict[str, Any] = {} if index == last else bare
        yield dataclasses.replace(output, token_ids=[token], logprobs=rows, **changed)


@corrects(
    "lmdeploy.serve.core.async_engine:AsyncEngine.generate",
    why="stops at ids of single tokens, and ignores stop strings of several tokens",
    upstream="https://github.com/InternLM/lmdeploy/issues/1731",
)
async def _generate(
    original: Original, self: Any, request: Any, stream_response: bool = True
) -> AsyncIterator[Any]:
    answers: Any = original(self, request, stream_response)
    if getattr(request, "consumed", True) is False:
        progress = _Progress()
        setattr(request.session, _PROGRESS, progress)
        config = request.gen_config
        count = config.logprobs
        if count == 0:
            config.logprobs = 1  # LMDeploy's engine reads 0 as no log-probabilities
        if count is not None and config.logprob_start_len < 0:
            answers = _ranked(answers, count)
        answers = _stopping(answers, progress, config) if config.stop_words else _joined(answers, progress)
    async with aclosing(answers):
        async for answer in answers:
            yield answer


async def _ranked(answers: Any, count: int) -> AsyncIterator[Any]:
    """Yield the answers, with each token's log-probabilities as a Ranked. count: the number of most likely tokens."""
    async with aclosing(answers):
        async for answer in answers:
            if answer.logprobs:
                rows = zip(answer.logprobs, answer.token_ids, strict=True)
                answer.logprobs = [Ranked(row, token, count) for row, token in rows]
            yield answer


async def _joined(answers: Any, progress: _Progress) -> AsyncIterator[Any]:
    """Yield one answer for each engine output, by joining the answers for the outputs that ``_split`` made of it."""
    whole: Any = None
    async with aclosing(answers):
        async for answer in answers:
            whole = answer if whole is None else _add(whole, answer)
            if not progress.more or answer.finish_reason is not None:
                yield whole
                whole = None


def _add(first: Any, second: Any) -> Any:
    rows = second.logprobs if first.logprobs is None else first.logprobs + (second.logprobs or [])
    return dataclasses.replace(
        second,
        response=first.response + second.response,
        token_ids=(first.token_ids or []) + (second.token_ids or []),
        logprobs=rows,
    )


async def _stopping(answers: Any, progress: _Progress, config: Any) -> AsyncIterator[Any]:
    """Yield the answers up to the first stop string. config: the request's GenerationConfig."""
    text = StopText(config.stop_words, config.include_stop_str_in_output, config.min_new_tokens or 0)
    waiting: list[Any] = []  # Releases of the tokens of one engine output
    async with aclosing(answers):
        async for answer in answers:
            if answer.finish_reason is not None:
                yield _ending(answer, text, waiting)
                continue  # let LMDeploy's generator end by itself; if closed, it counts as cancelled
            if text.stopped is None:
                waiting.append(text.feed(answer.token_ids or [], answer.logprobs, answer.response))
                progress.stopped = text.stopped is not None
            if not progress.more and not progress.stopped:
                yield _holding(answer, text, waiting)
                waiting.clear()


def _ending(answer: Any, text: StopText, waiting: list[Any]) -> Any:
    """Return the last answer of a request, with the text that was held back.

    answer: the last output of LMDeploy's generator. A stop token in it is kept in the result, unless a stop string has
        already ended the answer.
    waiting: the Releases since the previous output.
    """
    if text.stopped is not None:
        return _holding(dataclasses.replace(answer, finish_reason=text.stopped), text, waiting)
    waiting.append(text.finish())
    last = _holding(answer, text, waiting)
    if not answer.token_ids and not answer.logprobs:
        return last
    return dataclasses.replace(
        last,
        response=last.response + answer.response,
        token_ids=last.token_ids + (answer.token_ids or []),
        logprobs=(last.logprobs or []) + (answer.logprobs or []) or None,
        generate_token_len=text.token_count + len(answer.token_ids or []),
    )


def _holding(answer: Any, text: StopText, released: list[Any]) -> Any:
    """Return ``answer`` with the text, tokens and log-probabilities of ``released`` instead of its own."""
    return dataclasses.replace(
        answer,
        response="".join(part.text for part in released),
        token_ids=[token for part in released for token in part.token_ids],
        logprobs=[row for part in released for row in part.logprobs] or None,
        generate_token_len=text.token_count,
    )


@corrects(
    "lmdeploy.messages:GenerationConfig.convert_stop_bad_words_to_ids",
    why="drops a word of several tokens with a warning, and replaces any other word by all tokens that contain it",
    upstream="https://github.com/InternLM/lmdeploy/issues/1731",
)
def _convert(original: Original, self: Any, tokenizer: Any) -> None:
    special = _special_tokens(tokenizer.model.model) if self.stop_words or self.bad_words else {}
    for words, ids in (("stop_words", "stop_token_ids"), ("bad_words", "bad_token_ids")):
        if "" in (getattr(self, words) or ()):
            raise GenerationOptionError(field=words, given=getattr(self, words), expected="non-empty strings")
        tokens = {special[word] for word in getattr(self, words) or () if word in special}
        tokens.update(getattr(self, ids) or ())
        setattr(self, ids, sorted(tokens) or None)
    texts = [forbid(word, tokenizer, self.skip_special_tokens) for word in self.bad_words or ()]
    if texts:
        self.logits_processors = [*(self.logits_processors or []), *texts]


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return a dict from text to id of a tokenizer's special and added tokens.

    A stop or bad word that equals such a text means the token. tokenizer: the tokenizer of transformers, which LMDeploy
    wraps twice.
    """
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return dict(tokenizer.get_added_vocab()) | dict(special)
