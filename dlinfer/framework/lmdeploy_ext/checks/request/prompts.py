"""Refuses requests that would crash the engine's loop.

LMDeploy 0.18 runs all requests in one loop. An exception in the loop ends the engine for all users, but the server
process continues, and answers every request with "engine unavailable". These requests raise such an exception on every
device:

- a prompt without tokens, such as an empty text without BOS (``assert len(token_ids) > 0``);
- a token id outside the vocabulary (embedding lookup);
- an unknown adapter (``AdapterManager.get_adapter_ids``);
- top_k or logprobs above the size of the vocabulary (``torch.topk``);
- stop or bad token ids outside the vocabulary (``Tensor.gather``).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dlinfer.errors import GenerationOptionError
from dlinfer.framework.lmdeploy_ext.checks.model import block_diffusion
from dlinfer.framework.lmdeploy_ext.checks.request.generation_options import check_generation, check_sampling
from dlinfer.framework.lmdeploy_ext.checks.request.http_errors import request_error
from dlinfer.framework.lmdeploy_ext.device import activation, kv_memory
from dlinfer.framework.lmdeploy_ext.layers.block_diffusion import MODEL_TYPES, is_used
from dlinfer.framework.patching import Original, replaces

_LARGE_LOGIT = 100.0
"""Logits of up to this absolute value must stay finite when they are divided by the temperature."""


def refusal(token_ids: Sequence[int], vocab_size: int | None) -> str | None:
    """Return a reason to refuse a prompt; None if it can be served. vocab_size: None skips the check of token ids."""
    if len(token_ids) == 0:
        return "The prompt is empty: there is no token to continue from."
    if vocab_size is None:
        return None
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < vocab_size:
            return f"Token id {token} is outside the model's vocabulary of {vocab_size}."
    return None


def cache_refusal(length: int, async_engine: Any) -> str | None:
    """Return a reason to refuse a prompt of ``length`` tokens that does not fit into the KV cache; None if it fits."""
    longest = getattr(async_engine.backend_config, kv_memory.SESSION_LIMIT, None)
    if longest is None or length <= longest:
        return None
    return (
        f"The input has {length} tokens, but the KV cache has room for only {longest} tokens of one session; "
        f"session_len={async_engine.session_len} would allow more. Next step: send a shorter input, or start the "
        "server with a larger cache (num_gpu_blocks, cache_max_entry_count or DLINFER_CPU_KV_CACHE_GIB)."
    )


def fit_sampling(param: Any, vocab_size: int, dtype: torch.dtype) -> None:
    """Change a SamplingParam in place to values that the model can sample with, without changing their meaning.

    This limits top_k and num_logprobs to the size of the vocabulary. It drops stop and bad token ids outside the
    vocabulary, since such tokens are never drawn. If the temperature is so close to 0 that logits would overflow,
    sampling becomes greedy. dtype: the dtype of the logits.
    """
    if 0 < param.temperature < _LARGE_LOGIT / torch.finfo(dtype).max:
        param.temperature, param.top_k = 1.0, 1
    param.top_k = min(param.top_k, vocab_size)
    param.num_logprobs = min(param.num_logprobs, vocab_size)
    param.stop_words = _tokens(param.stop_words, vocab_size)
    param.bad_words = _tokens(param.bad_words, vocab_size)
    if param.logits_processors:
        param.logits_processors = [
            each.within(vocab_size) if hasattr(each, "within") else each for each in param.logits_processors
        ]


def _tokens(ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token for token in ids if 0 <= token < vocab_size]


def _fault(gen_config: Any, vocab_size: int | None, engine_config: Any = None) -> str | None:
    """Return a reason to refuse a GenerationConfig; None if it can be served.

    engine_config: the PytorchEngineConfig of the engine; None if it is not known.
    """
    if gen_config is None:
        return None
    try:
        check_generation(gen_config, engine_config)
    except GenerationOptionError as error:
        return error.explanation
    if vocab_size is not None and len(set(_tokens(gen_config.bad_token_ids or [], vocab_size))) == vocab_size:
        return "bad_token_ids forbids every token of the vocabulary."
    return None


@replaces(
    "lmdeploy.serve.core.async_engine:AsyncEngine._determine_gen_config",
    why="accepts prompts and options that end the engine's loop or do not fit the KV cache",
    when=activation.is_on,
)
def determine_gen_config(
    original: Original, self: Any, input_ids: Sequence[int], gen_config: Any = None
) -> Any:
    # Some remote-code configurations nest the language model where transformers does not look.
    vocab_size = getattr(self.hf_cfg.get_text_config(), "vocab_size", None)
    if reason := refusal(input_ids, vocab_size) or _fault(gen_config, vocab_size, self.backend_config):
        raise request_error("INVALID_REQUEST", reason)
    is_diffusion = getattr(self.hf_cfg, "model_type", "") in MODEL_TYPES
    if is_diffusion and gen_config is not None and (reason := block_diffusion.refusal(gen_config)):
        raise request_error("INVALID_REQUEST", reason)
    if reason := cache_refusal(len(input_ids), self):
        raise request_error("CONTEXT_LENGTH_EXCEEDED", reason)
    return original(self, input_ids, gen_config)


@replaces(
    "lmdeploy.serve.core.async_engine:AsyncEngine.preprocess",
    why="accepts the name of an unknown adapter, which ends the engine's loop with a KeyError",
    when=activation.is_on,
    signature="(self, messages, session_id, gen_config=None, tools=None, reasoning_effort=None, do_preprocess=True, "
    "adapter_name=None, input_ids=None, enable_thinking=None, chat_template_kwargs=None, media_io_kwargs=None, "
    "mm_processor_kwargs=None, **kwargs)",
)
async def preprocess(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    # adapter_name comes after messages, session_id, gen_config, tools, reasoning_effort and do_preprocess.
    adapter = args[6] if len(args) > 6 else kwargs.get("adapter_name")
    known = sorted(self.backend_config.adapters or {})
    if adapter is not None and adapter not in known:
        text = f"There is no adapter {adapter!r}. Loaded adapters: {', '.join(known) or 'none'}."
        raise request_error("INVALID_REQUEST", text)
    try:
        return await original(self, *args, **kwargs)
    except RuntimeError as error:  # LMDeploy's RequestError, which may say only that preprocessing failed
        from lmdeploy.serve.core.exceptions import ErrorCode

        cause = error.__cause__
        if cause is None or getattr(error, "code", None) != ErrorCode.PREPROCESS_FAILED:
            raise
        text = f"Request preprocessing failed: {str(cause) or type(cause).__name__}"
        raise request_error("PREPROCESS_FAILED", text) from cause


@replaces(
    "lmdeploy.pytorch.engine.engine:Engine._add_message",
    why="accepts requests that end the engine's loop, on every path (get_ppl, logits, RPC)",
)
def add_message(original: Original, self: Any, reqs: list[Any]) -> None:
    if not activation.serves(self.engine_config.device_type):
        original(self, reqs)
        return
    from lmdeploy.messages import ResponseType

    vocab_size = self.model_config.vocab_size
    keys = self.adapter_manager.keys  # None stands for the base model
    is_diffusion = is_used(self.model_config)
    fit = []
    for request in reqs:
        is_servable = _is_servable(request.data, vocab_size) and (
            not is_diffusion or block_diffusion.is_servable(request.data["sampling_param"])
        )
        if request.data["adapter_name"] in keys and is_servable:
            request.data["adapter_name"] = keys[request.data["adapter_name"]]
            fit_sampling(request.data["sampling_param"], vocab_size, self.model_config.dtype)
            fit.append(request)
        else:
            self._response(request.resp, ResponseType.NOT_SUPPORTED)
    if fit:
        original(self, fit)


def _is_servable(data: dict[str, Any], vocab_size: int) -> bool:
    try:
        check_sampling(data["sampling_param"])
    except GenerationOptionError:
        return False
    return refusal(data["token_ids"], vocab_size) is None
