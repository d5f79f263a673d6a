"""How tokens are to be drawn, checked before a request costs anything, with an error that names the field.

LMDeploy 0.18 asserts on some fields, takes others for its default in silence, and lets through numbers that end the
engine's loop, which is the end for every user: ``min_new_tokens`` beyond 64 bits (``torch.tensor``), a window of
``repetition_ngram_size`` beyond its own. One table says what each field takes; ``GenerationConfig`` is checked against
it when it is made and again when a request comes, since its fields can be set in between.
"""

import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlinfer.errors import GenerationOptionError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.sampling import penalties
from dlinfer.framework.patching import Patch

_INT32 = 2**31 - 1
_MOST_CHOICES = 128
"""As LMDeploy's chats have."""


@dataclass(frozen=True)
class _Number:
    """A finite number of ``[low, high]``; a whole one where ``whole`` says so."""

    low: float
    high: float = math.inf
    whole: bool = True
    optional: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        limits = [f"at least {self.low}"] if self.low > -math.inf else []
        limits += [f"at most {self.high}"] if self.high < math.inf else []
        text = f"{kind} of {' and '.join(limits)}" if limits else kind
        return f"{text}, or None" if self.optional else text

    def takes(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.whole else numbers.Real):
            return False
        number: Any = value  # the abstract classes declare no comparison
        # Whole numbers may be too large for a float; infinities and NaN are no whole numbers.
        return self.low <= number <= self.high and (self.whole or math.isfinite(number))


@dataclass(frozen=True)
class _List:
    """A list of one type, or None."""

    item: type
    word: str

    def __str__(self) -> str:
        return f"a list of {self.word}, or None"

    def takes(self, value: Any) -> bool:
        if value is None:
            return True
        items = isinstance(value, list | tuple)
        return items and all(isinstance(each, self.item) and not isinstance(each, bool) for each in value)


# Of GenerationConfig, and of SamplingParam, which the engine makes of it, where the two have a field of one name.
_TAKES: dict[str, _Number | _List] = {
    "n": _Number(1, 1),
    "max_new_tokens": _Number(0, optional=True),
    "min_new_tokens": _Number(0, _INT32, optional=True),
    "top_p": _Number(0, 1, whole=False),
    "top_k": _Number(0),
    "min_p": _Number(0, 1, whole=False),
    "temperature": _Number(0, 2, whole=False),
    # A larger or smaller one drives logits out of the range of 16-bit numbers.
    "repetition_penalty": _Number(0.01, 100, whole=False),
    "presence_penalty": _Number(-2, 2, whole=False),
    "frequency_penalty": _Number(-2, 2, whole=False),
    "random_seed": _Number(-math.inf, optional=True),
    "stop_words": _List(str, "strings"),
    "bad_words": _List(str, "strings"),
    "stop_token_ids": _List(numbers.Integral, "token ids"),
    "bad_token_ids": _List(numbers.Integral, "token ids"),
    "logprobs": _Number(0, optional=True),
    "logprob_start_len": _Number(-1),
    "repetition_ngram_threshold": _Number(-math.inf, _INT32),
}
_NOT_OF_THE_ENGINE = ("n", "stop_words", "bad_words", "logprobs")
"""Fields that SamplingParam lacks or uses for something else (its stop_words are token ids)."""


def check_generation(config: Any) -> None:
    """Raise GenerationOptionError for the first field of a GenerationConfig that cannot be served."""
    _check_fields(config, _TAKES)
    least, most = config.min_new_tokens, config.max_new_tokens
    if least is not None and most is not None and least > most:
        raise _refuse("min_new_tokens", least, f"at most max_new_tokens={most}")
    if config.logprob_start_len >= 0 and config.logprobs is None:
        raise _refuse("logprobs", None, "a number of them, since logprob_start_len is given")
    style = config.response_format
    if isinstance(style, dict) and style.get("type") == "regex_schema" and not style.get("regex_schema"):
        raise _refuse("response_format", style, "a pattern under 'regex_schema'")


def check_sampling(param: Any) -> None:
    """Raise GenerationOptionError for the first field of a SamplingParam that would end the engine's loop."""
    _check_fields(param, {name: rule for name, rule in _TAKES.items() if name not in _NOT_OF_THE_ENGINE})


def _check_fields(config: Any, takes: dict[str, _Number | _List]) -> None:
    for name, rule in takes.items():
        if hasattr(config, name) and not rule.takes(getattr(config, name)):
            raise _refuse(name, getattr(config, name), str(rule))
    window = _repetition_window()
    size = _Number(-math.inf, window)
    if not size.takes(config.repetition_ngram_size):
        raise _refuse("repetition_ngram_size", config.repetition_ngram_size, str(size))


def _refuse(field: str, given: Any, expected: str) -> GenerationOptionError:
    text = repr(given)
    return GenerationOptionError(
        field=field, given=text if len(text) <= 80 else f"{text[:77]}...", expected=expected
    )


def _repetition_window() -> int:
    """How many tokens LMDeploy looks back for a repetition."""
    from lmdeploy.pytorch import envs

    return envs.repetition_window_size


# --- where LMDeploy makes a GenerationConfig


def _post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        if activation.active() is not None:
            check_generation(self)
        original(self)

    return __post_init__


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_generation_config(
        request: Any,
        default_gen_config: dict[str, Any],
        *,
        max_new_tokens: int | None = None,
        **extra_kwargs: Any,
    ) -> Any:
        if activation.active() is None:
            return original(request, default_gen_config, max_new_tokens=max_new_tokens, **extra_kwargs)
        if isinstance(extra_kwargs.get("stop_words"), str):  # /generate passes on one word as it came
            extra_kwargs["stop_words"] = [extra_kwargs["stop_words"]]
        defaults = dict(default_gen_config)
        if max_new_tokens is not None and (defaults.get("min_new_tokens") or 0) > max_new_tokens:
            defaults["min_new_tokens"] = max_new_tokens  # the model's wish, not the client's fault
        config = original(request, defaults, max_new_tokens=max_new_tokens, **extra_kwargs)
        penalties.take(config, request)
        check_generation(config)
        return config

    return build_generation_config


# --- where the server looks at a request


def _validate_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_request(
        request: Any, server_context: Any, request_validator: Callable[..., str], **validator_kwargs: Any
    ) -> Any:
        if activation.active() is None:
            return original(request, server_context, request_validator, **validator_kwargs)
        if getattr(request, "n", 1) is None:  # the protocol's word for "not given"
            request.n = 1
        refused = original(request, server_context, request_validator, **validator_kwargs)
        if refused is None:
            _check_request(request, server_context)
        return refused

    return validate_request


def _check_request(request: Any, server_context: Any) -> None:
    """Refuse what would fail after the endpoint has opened a session, which it then would not close."""
    from lmdeploy.serve.openai.endpoints.common import build_serving_generation_config
    from lmdeploy.serve.openai.protocol import CompletionRequest

    # The endpoints themselves look at these.
    own: dict[str, Any] = {"logprobs": None, "logprob_start_len": -1}
    if isinstance(request, CompletionRequest):
        if not _is_prompts(request.prompt):
            raise _refuse("prompt", request.prompt, "a string, token ids, or a list of at least one of these")
        own["logprobs"] = request.logprobs
        if not (choices := _Number(1, _MOST_CHOICES)).takes(request.n):
            raise _refuse("n", request.n, str(choices))
        if ((request.n or 1) > 1 or _is_many(request.prompt)) and request.session_id not in (None, -1):
            raise _refuse("session_id", request.session_id, "none with several choices or prompts")
    own["n"] = 1  # several choices become as many requests
    build_serving_generation_config(request, server_context, **own)


def _is_prompts(prompt: Any) -> bool:
    """Whether /v1/completions takes this for one prompt or for several."""
    if isinstance(prompt, str) or _is_tokens(prompt):
        return True
    return bool(prompt) and (all(isinstance(each, str) for each in prompt) or all(map(_is_tokens, prompt)))


def _is_tokens(prompt: Any) -> bool:
    ids = _List(numbers.Integral, "token ids")
    return isinstance(prompt, list) and bool(prompt) and ids.takes(prompt)


def _is_many(prompt: Any) -> bool:
    return isinstance(prompt, list) and not _is_tokens(prompt) and len(prompt) > 1


# --- logit_bias


@dataclass(frozen=True)
class LogitBias:
    """A logits processor that adds to the logits of some tokens; unlike LMDeploy's it can be sent to the engine."""

    tokens: tuple[int, ...]
    biases: tuple[float, ...]

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        """logits [vocabulary], changed in place and returned; token_ids: what was generated, not used."""
        logits[list(self.tokens)] += logits.new_tensor(self.biases)
        return logits

    def within(self, vocab_size: int) -> "LogitBias":
        """The same for a model that has fewer tokens than the tokenizer."""
        kept = [pair for pair in zip(self.tokens, self.biases, strict=True) if pair[0] < vocab_size]
        return LogitBias(tuple(token for token, _ in kept), tuple(bias for _, bias in kept))


def _logit_bias(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def logit_bias_logits_processor(logit_bias: dict[Any, float], tokenizer: Any) -> Any:
        processor = original(logit_bias, tokenizer)  # checks the token ids
        if activation.active() is None:
            return processor
        wrong = next((token for token, bias in logit_bias.items() if not math.isfinite(bias)), None)
        if wrong is not None:
            raise ValueError(f"logit_bias of token {wrong} is {logit_bias[wrong]}, not a finite number")
        (biases,) = processor.args  # token -> bias, cut to [-100, 100]
        return LogitBias(tuple(biases), tuple(biases.values()))

    return logit_bias_logits_processor


PATCHES = (
    Patch(
        target="lmdeploy.messages:GenerationConfig.__post_init__",
        why="asserts without naming the field, and lets through what ends the engine's loop",
        signature="(self)",
        build=_post_init,
    ),
    Patch(
        target="lmdeploy.serve.core.generation_config:build_generation_config",
        why="drops presence_penalty and frequency_penalty; /generate passes on a single stop word as it came; "
        "min_new_tokens of generation_config.json may be more than a request asks for",
        signature="(request, default_gen_config, *, max_new_tokens=None, **extra_kwargs)",
        build=_build,
    ),
    Patch(
        target="lmdeploy.serve.openai.endpoints.common:validate_request",
        why="n of null is a 500; a request that fails after it leaves its session open for ever",
        signature="(request, server_context, request_validator, **validator_kwargs)",
        build=_validate_request,
        essential=False,
    ),
    Patch(
        target="lmdeploy.serve.openai.chat_completions.logits_processors:logit_bias_logits_processor",
        why="gives a local function, which cannot be sent to the engine's process: a 500 for any logit_bias",
        signature="(logit_bias, tokenizer)",
        build=_logit_bias,
        essential=False,
    ),
)
