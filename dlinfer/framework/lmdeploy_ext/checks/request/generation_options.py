"""Checks a request's generation options before any work is done. The error names the field.

LMDeploy 0.18 fails an assertion for an invalid value of some fields, and silently replaces an invalid value of other
fields by the default. Two invalid values crash the engine's loop: ``min_new_tokens`` beyond 64 bits (in
``torch.tensor``), and a ``repetition_ngram_size`` above LMDeploy's repetition window. A ``GenerationConfig`` is checked
when it is created, and again when its request arrives, since its fields may have changed.
"""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlinfer.errors import GenerationOptionError
from dlinfer.framework.lmdeploy_ext.checks.request.http_errors import shown
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.sampling import penalties
from dlinfer.framework.patching import Original, replaces

_INT32 = 2**31 - 1
_MOST_CHOICES = 128
"""The largest ``n`` of a completion request; LMDeploy's chat endpoint has the same limit."""


@dataclass(frozen=True)
class _Number:
    """Allows finite numbers in ``[low, high]``. whole: allow only integers. optional: also allow None."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = True
    optional: bool = False

    def __str__(self) -> str:
        limits = [f"at least {self.low}"] if self.low > -math.inf else []
        limits += [f"at most {self.high}"] if self.high < math.inf else []
        kind = "a whole number" if self.whole else "a number"
        return kind + " of " * bool(limits) + " and ".join(limits) + ", or None" * self.optional

    def takes(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return False
        number: Any = value  # the abstract number classes declare no comparison
        # Whole numbers may be too large for a float; infinities and NaN are no whole numbers.
        return self.low <= number <= self.high and (self.whole or math.isfinite(number))


@dataclass(frozen=True)
class _List:
    """Allows None, and lists whose items have one type. item: that type. word: a noun for the items in error texts."""

    item: type
    word: str

    def __str__(self) -> str:
        return f"a list of {self.word}, or None"

    def takes(self, value: Any) -> bool:
        return value is None or (
            isinstance(value, list | tuple)
            and all(isinstance(each, self.item) and not isinstance(each, bool) for each in value)
        )


# For the fields of GenerationConfig, and fields of the same name in the engine's SamplingParam.
_TOKEN_IDS = _List(numbers.Integral, "token ids")
_TAKES: dict[str, _Number | _List] = {
    "n": _Number(1, 1),
    "max_new_tokens": _Number(0, optional=True),
    "min_new_tokens": _Number(0, _INT32, optional=True),
    "top_p": _Number(0, 1, whole=False),
    "top_k": _Number(0),
    "min_p": _Number(0, 1, whole=False),
    "temperature": _Number(0, 2, whole=False),
    # Values outside this range drive logits out of the range of 16-bit floats.
    "repetition_penalty": _Number(0.01, 100, whole=False),
    "presence_penalty": _Number(-2, 2, whole=False),
    "frequency_penalty": _Number(-2, 2, whole=False),
    "random_seed": _Number(optional=True),
    "stop_words": _List(str, "strings"),
    "bad_words": _List(str, "strings"),
    "stop_token_ids": _TOKEN_IDS,
    "bad_token_ids": _TOKEN_IDS,
    "logprobs": _Number(0, optional=True),
    "logprob_start_len": _Number(-1),
    "repetition_ngram_threshold": _Number(high=_INT32),
}
_NOT_OF_THE_ENGINE = ("n", "stop_words", "bad_words", "logprobs")
"""Fields that SamplingParam lacks, or that hold other values there (stop_words: token ids). They are not checked."""


_NO_MODE = (
    "no logprobs_mode: use PytorchEngineConfig(logprobs_mode='raw_logprobs') or --logprobs-mode raw_logprobs"
)
"""Without a mode, LMDeploy 0.18 scores prompts with raw logits in place of log-probabilities."""


def check_generation(config: Any, engine_config: Any = None) -> None:
    """Raise GenerationOptionError for the first field of a GenerationConfig that cannot be served.

    engine_config: the PytorchEngineConfig of the engine that serves it; None if it is not known yet.
    """
    _check_fields(config, _TAKES)
    least, most = config.min_new_tokens, config.max_new_tokens
    if least is not None and most is not None and least > most:
        raise _refuse("min_new_tokens", least, f"at most max_new_tokens={most}")
    if config.logprob_start_len >= 0 and config.logprobs is None:
        raise _refuse("logprobs", None, "a number, because logprob_start_len is given")
    if config.logprob_start_len >= 0 and engine_config is not None and engine_config.logprobs_mode is None:
        raise _refuse("logprob_start_len", config.logprob_start_len, f"-1, because the engine has {_NO_MODE}")
    style = config.response_format
    if isinstance(style, dict) and style.get("type") == "regex_schema" and not style.get("regex_schema"):
        raise _refuse("response_format", style, "a pattern under 'regex_schema'")


def check_sampling(param: Any) -> None:
    """Raise GenerationOptionError for the first field of a SamplingParam that would crash the engine's loop."""
    _check_fields(param, {name: rule for name, rule in _TAKES.items() if name not in _NOT_OF_THE_ENGINE})


def _check_fields(config: Any, takes: dict[str, _Number | _List]) -> None:
    from lmdeploy.pytorch import envs

    window = _Number(high=envs.repetition_window_size)
    for name, rule in (takes | {"repetition_ngram_size": window}).items():
        if hasattr(config, name) and not rule.takes(getattr(config, name)):
            raise _refuse(name, getattr(config, name), rule)


def _refuse(field: str, value: object, expected: object) -> GenerationOptionError:
    return GenerationOptionError(field=field, given=shown(value), expected=str(expected))


# --- where LMDeploy makes a GenerationConfig


@replaces(
    "lmdeploy.messages:GenerationConfig.__post_init__",
    why="fails assertions that do not name the field, and accepts values that end the engine's loop",
    when=activation.is_on,
)
def post_init(original: Original, self: Any) -> None:
    check_generation(self)
    original(self)


@replaces(
    "lmdeploy.serve.core.generation_config:build_generation_config",
    why="drops presence_penalty and frequency_penalty, passes a single stop word on as a string, and lets "
    "min_new_tokens of generation_config.json exceed the request's max_new_tokens",
    when=activation.is_on,
)
def build_generation_config(
    original: Original,
    request: Any,
    default_gen_config: dict[str, Any],
    *,
    max_new_tokens: int | None = None,
    **extra_kwargs: Any,
) -> Any:
    if isinstance(extra_kwargs.get("stop_words"), str):
        extra_kwargs["stop_words"] = [extra_kwargs["stop_words"]]
    defaults = dict(default_gen_config)
    if max_new_tokens is not None and (defaults.get("min_new_tokens") or 0) > max_new_tokens:
        # generation_config.json set the larger value, not the client.
        defaults["min_new_tokens"] = max_new_tokens
    config = original(request, defaults, max_new_tokens=max_new_tokens, **extra_kwargs)
    penalties.take(config, request)
    check_generation(config)
    return config


# --- where the server checks a request


@replaces(
    "lmdeploy.serve.openai.endpoints.common:validate_request",
    why="answers n=null with HTTP status 500, and accepts requests that fail only after their session is open, which "
    "then stays open, and log-probabilities that the server cannot give",
    when=activation.is_on,
    essential=False,
)
def validate_request(
    original: Original,
    request: Any,
    server_context: Any,
    request_validator: Callable[..., str],
    **validator_kwargs: Any,
) -> Any:
    if getattr(request, "n", 1) is None:  # null means "not given" in the protocol
        request.n = 1
    _check_mode(request, server_context)
    refused = original(request, server_context, request_validator, **validator_kwargs)
    if refused is None:
        _check_request(request, server_context)
    return refused


def _check_mode(request: Any, server_context: Any) -> None:
    """Refuse log-probabilities of a completion if the server has no mode. LMDeploy takes 0 for none."""
    from lmdeploy.serve.openai.protocol import CompletionRequest

    wants_logprobs = isinstance(request, CompletionRequest) and request.logprobs is not None
    if wants_logprobs and server_context.engine_config.logprobs_mode is None:
        raise _refuse("logprobs", request.logprobs, f"null, because the server has {_NO_MODE}")


def _check_request(request: Any, server_context: Any) -> None:
    """Refuse a request whose options are invalid, before LMDeploy's endpoint opens a session for it.

    The endpoint would refuse the options only after it has opened the session, and would never close the session.
    """
    from lmdeploy.serve.openai.endpoints.common import build_serving_generation_config
    from lmdeploy.serve.openai.protocol import CompletionRequest

    own: dict[str, Any] = {"logprobs": None, "logprob_start_len": -1}  # the endpoints check these themselves
    if isinstance(request, CompletionRequest):
        prompts = _prompts(request.prompt)
        if not prompts:
            raise _refuse("prompt", request.prompt, "a string, token ids, or a list of at least one of these")
        own["logprobs"] = request.logprobs
        if not (choices := _Number(1, _MOST_CHOICES)).takes(request.n):
            raise _refuse("n", request.n, choices)
        if (request.n or 1) * len(prompts) > 1 and request.session_id not in (None, -1):
            raise _refuse("session_id", request.session_id, "no session_id with several choices or prompts")
    own["n"] = 1  # LMDeploy serves n choices as n requests
    build_serving_generation_config(request, server_context, **own)


def _prompts(prompt: Any) -> list[Any]:
    """Return the list of prompts in a request to /v1/completions; empty if ``prompt`` has a wrong type.

    prompt: the request's field, which may hold one prompt or a list of prompts.
    """
    if isinstance(prompt, str) or _is_tokens(prompt):
        return [prompt]
    is_alike = all(isinstance(each, str) for each in prompt) or all(map(_is_tokens, prompt))
    return prompt if is_alike else []


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and _TOKEN_IDS.takes(prompt)
