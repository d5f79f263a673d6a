"""No request ends the engine: what its loop would raise on is refused or made harmless before it gets there.

LMDeploy 0.18 runs all requests in one loop; an exception in it is the end of the engine, for every user, while the
process lives on and answers "engine unavailable". These reach it, on cuda as on our devices: a prompt without a
token (``assert len(token_ids) > 0``, e.g. an empty prompt where the tokenizer adds no BOS), a token id outside the
vocabulary (embedding lookup), the name of an adapter that there is not (``AdapterManager.get_adapter_ids``), top_k or
logprobs above the size of the vocabulary (``torch.topk``), and stop or bad token ids outside it (``Tensor.gather``).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dlinfer.errors import GenerationOptionError
from dlinfer.framework.lmdeploy_ext.checks.request.sampling_checks import (
    check_generation,
    check_sampling,
)
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Patch

_LONGEST = "_dlinfer_longest_session"
"""Attribute of PytorchEngineConfig: tokens that a session may have, by session_len and by the KV cache."""

_LARGE_LOGIT = 100.0
"""Logits up to this size stay finite when they are divided by the temperature."""


def refusal(token_ids: Sequence[int], vocab_size: int | None) -> str | None:
    """Why a prompt cannot be served, or None. Without a vocab_size only its length is looked at."""
    if len(token_ids) == 0:
        return "The prompt is empty: there is no token to continue from."
    if vocab_size is None:
        return None
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        return f"Token id {wrong} is outside the model's vocabulary of {vocab_size}."
    return None


def cache_refusal(length: int, async_engine: Any) -> str | None:
    """Why a prompt of so many tokens does not fit into the KV cache, or None."""
    longest = getattr(async_engine.backend_config, _LONGEST, None)
    if longest is None or length <= longest:
        return None
    return (
        f"Input length ({length}) is more than the KV cache holds: a session has at most {longest} tokens, though "
        f"session_len is {async_engine.session_len}. Next step: a larger cache, by num_gpu_blocks, "
        "cache_max_entry_count or DLINFER_CPU_KV_CACHE_GIB, or a shorter input."
    )


def _max_session_len(original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def _get_max_session_len(self: Any) -> int:
        longest = original(self)
        if activation.serves(self.engine_config.device_type):
            setattr(self.engine_config, _LONGEST, longest)  # a copy goes to the server's process
        return longest

    return _get_max_session_len


def fit_sampling(param: Any, vocab_size: int, dtype: torch.dtype) -> None:
    """Bring a SamplingParam inside the vocabulary and the range of the logits' dtype, in place, without changing what
    it means.

    More candidates than tokens are all tokens; an id that is no token is never drawn, so neither stops nor needs
    forbidding; a logits processor of ours drops it likewise. Logits divided by a temperature next to zero become
    infinite, and the draw NaN: the likeliest token, which that temperature means, is asked for instead.
    """
    if 0 < param.temperature < _LARGE_LOGIT / torch.finfo(dtype).max:
        param.temperature, param.top_k = 1.0, 1
    param.top_k = min(param.top_k, vocab_size)
    param.num_logprobs = min(param.num_logprobs, vocab_size)
    param.stop_words = _tokens(param.stop_words, vocab_size)
    param.bad_words = _tokens(param.bad_words, vocab_size)
    if param.logits_processors:
        param.logits_processors = [_within(each, vocab_size) for each in param.logits_processors]


def _within(processor: Any, vocab_size: int) -> Any:
    return processor.within(vocab_size) if hasattr(processor, "within") else processor


def _fault(gen_config: Any, vocab_size: int | None) -> str | None:
    """Why a GenerationConfig cannot be served, or None."""
    if gen_config is None:
        return None
    try:
        check_generation(gen_config)
    except GenerationOptionError as error:
        return error.explanation
    if vocab_size is not None and len(set(_tokens(gen_config.bad_token_ids or [], vocab_size))) == vocab_size:
        return "bad_token_ids forbids every token of the vocabulary."
    return None


def _tokens(ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token for token in ids if 0 <= token < vocab_size]


def _determine_gen_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _determine_gen_config(self: Any, input_ids: Sequence[int], gen_config: Any = None) -> Any:
        if activation.active() is not None:
            from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

            # Some remote-code configurations nest the language model where transformers does not look.
            vocab_size = getattr(self.hf_cfg.get_text_config(), "vocab_size", None)
            reason = refusal(input_ids, vocab_size) or _fault(gen_config, vocab_size)
            if reason is not None:
                raise RequestError(ErrorCode.INVALID_REQUEST, reason)
            reason = cache_refusal(len(input_ids), self)
            if reason is not None:
                raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, reason)
        return original(self, input_ids, gen_config)

    return _determine_gen_config


def _preprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def preprocess(
        self: Any, messages: Any, session_id: Any, gen_config: Any = None, tools: Any = None,
        reasoning_effort: Any = None, do_preprocess: bool = True, adapter_name: str | None = None, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if activation.active() is not None:
            known = sorted(self.backend_config.adapters or {})
            if adapter_name is not None and adapter_name not in known:
                from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

                listed = ", ".join(known) or "none"
                raise RequestError(
                    ErrorCode.INVALID_REQUEST, f"There is no adapter {adapter_name!r}; there are: {listed}."
                )
        try:
            return await original(
                self, messages, session_id, gen_config, tools, reasoning_effort, do_preprocess, adapter_name, *args,
                **kwargs,
            )  # fmt: skip
        except RuntimeError as error:  # LMDeploy's RequestError
            raise _with_reason(error) from error.__cause__

    return preprocess


def _with_reason(error: RuntimeError) -> RuntimeError:
    """The error with what caused it, where LMDeploy says only that preprocessing failed."""
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

    cause = error.__cause__
    if (
        activation.active() is None
        or cause is None
        or getattr(error, "code", None) != ErrorCode.PREPROCESS_FAILED
    ):
        return error
    reason = str(cause) or type(cause).__name__
    return RequestError(ErrorCode.PREPROCESS_FAILED, f"Request preprocessing failed: {reason}")


def _is_servable(data: dict[str, Any], vocab_size: int) -> bool:
    try:
        check_sampling(data["sampling_param"])
    except GenerationOptionError:
        return False
    return refusal(data["token_ids"], vocab_size) is None


def _add_message(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _add_message(self: Any, reqs: list[Any]) -> None:
        if not activation.serves(self.engine_config.device_type):
            original(self, reqs)
            return
        from lmdeploy.messages import ResponseType

        vocab_size = self.model_config.vocab_size
        adapters = self.adapter_manager.adapter_id_map  # None, for the base model, among them
        fit = []
        for request in reqs:
            if request.data["adapter_name"] in adapters and _is_servable(request.data, vocab_size):
                fit_sampling(request.data["sampling_param"], vocab_size, self.model_config.dtype)
                fit.append(request)
            else:
                self._response(request.resp, ResponseType.NOT_SUPPORTED)
        if fit:
            original(self, fit)

    return _add_message


PATCHES = (
    Patch(
        target="lmdeploy.serve.core.async_engine:AsyncEngine.preprocess",
        why="an adapter's name that there is not ends the engine's loop with a KeyError",
        signature="(self, messages, session_id, gen_config=None, tools=None, reasoning_effort=None, "
        "do_preprocess=True, adapter_name=None, input_ids=None, enable_thinking=None, chat_template_kwargs=None, "
        "media_io_kwargs=None, mm_processor_kwargs=None, **kwargs)",
        build=_preprocess,
    ),
    Patch(
        target="lmdeploy.serve.core.async_engine:AsyncEngine._determine_gen_config",
        why="the last check of a prompt where an error still reaches the user with a reason",
        signature="(self, input_ids, gen_config=None)",
        build=_determine_gen_config,
    ),
    Patch(
        target="lmdeploy.pytorch.engine.engine:Engine._get_max_session_len",
        why="is what a request is refused by, in words of the model's context, where the KV cache is smaller",
        signature="(self)",
        build=_max_session_len,
        essential=False,
    ),
    Patch(
        target="lmdeploy.pytorch.engine.engine:Engine._add_message",
        why="the last point before the engine's loop would raise, for requests on every path (get_ppl, logits, RPC)",
        signature="(self, reqs)",
        build=_add_message,
    ),
)
