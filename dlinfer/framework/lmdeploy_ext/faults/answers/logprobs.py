"""Give log-probabilities as clients expect them: the most likely tokens, including the chosen one, as readable text.

LMDeploy 0.18 leaves the chosen token out of ``top_logprobs``, which then has 19 entries instead of 20. It also writes
tokens and their ``bytes`` in the spelling of its vocabulary (``Ġthe``).
"""

from collections.abc import Sequence
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.answers.token_text import text_of
from dlinfer.framework.patching import Original


class Ranked(dict[int, float]):
    """A dict from token id to log-probability. It has the chosen token and the ``count`` most likely tokens."""

    def __init__(self, row: dict[int, float], chosen: int, count: int) -> None:
        """Select the tokens from ``row``, a dict from token id to log-probability. chosen: the chosen token's id."""
        self.top = sorted(row.items(), key=lambda item: -item[1])[:count]
        """The ``count`` most likely tokens, best first."""
        super().__init__({chosen: row[chosen]} | dict(self.top))


_TOO_FEW = "https://github.com/InternLM/lmdeploy/issues/1548"


@corrects(
    "lmdeploy.serve.openai.chat_completions.logprobs:_create_chat_completion_logprobs",
    why="leaves the chosen token out of the most likely tokens, and spells tokens as the vocabulary does",
    upstream=_TOO_FEW,
    essential=False,
)
def _chat_logprobs(
    original: Original,
    tokenizer: Any,
    token_ids: Sequence[int] | None = None,
    logprobs: Sequence[Any] | None = None,
) -> Any:
    if token_ids is None or not logprobs or not isinstance(logprobs[0], Ranked):
        return original(tokenizer, token_ids, logprobs)
    from lmdeploy.serve.openai.protocol import ChatCompletionTokenLogprob, ChoiceLogprobs, TopLogprob

    content = []
    for token, row in zip(token_ids, logprobs, strict=True):
        text, raw = text_of(tokenizer, token)
        top = []
        for other, value in row.top:
            other_text, other_raw = text_of(tokenizer, other)
            top.append(TopLogprob(token=other_text, bytes=list(other_raw), logprob=value))
        content.append(
            ChatCompletionTokenLogprob(token=text, bytes=list(raw), logprob=row[token], top_logprobs=top)
        )
    return ChoiceLogprobs(content=content)


@corrects(
    "lmdeploy.serve.openai.endpoints.generate:_create_top_logprobs",
    why="drops the chosen token if more log-probabilities are known than the request asks for",
    upstream=_TOO_FEW,
    essential=False,
)
def _top_logprobs(
    original: Original,
    token_ids: Sequence[int] | None = None,
    logprobs: Sequence[Any] | None = None,
    top_logprobs_num: int = 0,
) -> Any:
    if token_ids is None or not logprobs or not isinstance(logprobs[0], Ranked):
        return original(token_ids, logprobs, top_logprobs_num)
    return [[(value, token) for token, value in row.top] for row in logprobs]


@corrects(
    "lmdeploy.serve.core.chat_runner:_normalize_runner_gen_config_kwargs",
    why="asks for one top_logprob if a request asks for none",
    essential=False,
)
def _runner_kwargs(original: Original, request: Any, gen_config_kwargs: dict[str, Any]) -> Any:
    kwargs = original(request, gen_config_kwargs)
    if request.logprobs and not request.top_logprobs and "logprobs" not in gen_config_kwargs:
        kwargs["logprobs"] = 0  # only the chosen token's
    return kwargs
