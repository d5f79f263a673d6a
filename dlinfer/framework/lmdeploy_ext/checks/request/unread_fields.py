"""Refuses fields of requests that no code of LMDeploy's reads, where a value asks for something, with a 400.

LMDeploy 0.18 declares some of these fields and drops them; others belong to OpenAI's, Anthropic's or vLLM's protocol
and are dropped as unknown. Fields that change no answer (``user``, ``metadata``, ``store``) are accepted.
"""

from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Original, Patch, replaces

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "with_cache": (False,),
    "preserve_cache": (False,),
    "n": (1,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "sampling_params": ({},),
    "include": ([], ["reasoning.encrypted_content"]),
    "top_logprobs": (0,),
    "logprobs": (False,),
    "return_token_ids": (False,),
    "ignore_eos": (False,),
    "encoding_format": ("float",),
}
_NEUTRAL |= dict.fromkeys(
    "bad_words allowed_token_ids logits_processors functions stop_token_ids documents mcp_servers stop".split(),
    ([],),
)
"""Field -> values that ask for nothing. For every other field only null does."""

_VLLM = (
    "best_of use_beam_search length_penalty min_tokens bad_words allowed_token_ids prompt_logprobs "
    "truncate_prompt_tokens logits_processors structured_outputs guided_json guided_regex guided_choice guided_grammar "
)
"""vLLM's additions to OpenAI's protocol."""

_NAMES = {
    "/v1/chat/completions": _VLLM + "functions function_call modalities audio web_search_options verbosity "
    "stop_token_ids echo chat_template add_generation_prompt continue_final_message documents",
    "/v1/completions": _VLLM
    + "suffix response_format logit_bias migration_request with_cache preserve_cache",
    "/generate": _VLLM
    + "n seed min_new_tokens presence_penalty frequency_penalty logit_bias response_format "
    "sampling_params",
    "/v1/responses": _VLLM
    + "include logit_bias max_tool_calls top_logprobs logprobs n min_new_tokens stop_token_ids "
    "return_token_ids",
    "/v1/messages": _VLLM
    + "output_format mcp_servers container seed stop min_new_tokens min_p presence_penalty "
    "frequency_penalty repetition_penalty logit_bias response_format stop_token_ids ignore_eos",
    "/pooling": "encoding_format dimensions",
    "/abort_request": "finished_reason abort_message",
}
UNREAD = {path: {name: _NEUTRAL.get(name, ()) for name in names.split()} for path, names in _NAMES.items()}
"""Path -> field that nobody reads -> values that ask for nothing, beside null."""


def check_fields(path: str, body: Any) -> None:
    """Raise UnsupportedFeatureError for the first field of a request's body that would be dropped."""
    if not isinstance(body, dict):
        return
    for field, neutral in UNREAD.get(path, {}).items():
        value = body.get(field)
        if value is None or any(value == each and type(value) is type(each) for each in neutral):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and value in neutral:
            continue  # 1.0 for 1
        if field == "best_of" and value == (body.get("n") or 1):
            continue  # nothing to choose from
        raise _refuse(path, field, value, neutral)
    if path == "/v1/responses":
        _check_nested(path, body, "text", "verbosity", ("medium",))
        _check_nested(path, body, "reasoning", "effort", ("low", "medium", "high"))


def _check_nested(path: str, body: dict[str, Any], field: str, inner: str, taken: tuple[Any, ...]) -> None:
    outer = body.get(field)
    value = outer.get(inner) if isinstance(outer, dict) else None
    if value is not None and value not in taken:
        raise _refuse(path, f"{field}.{inner}", value, taken)


def _refuse(path: str, field: str, value: Any, neutral: tuple[Any, ...]) -> UnsupportedFeatureError:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    instead = f" or give {' or '.join(map(repr, neutral))}" if neutral else ""
    return refuse(f"{field}={shown} in {path}", f"leave {field} out{instead}")


def _validate(original: Original) -> Any:
    from fastapi import Request

    async def validate_json_request(raw_request: Request) -> None:  # FastAPI reads this signature
        original(raw_request)
        if not activation.is_on() or raw_request.url.path not in UNREAD:
            return
        try:
            body = await raw_request.json()
        except ValueError:  # FastAPI reports that it is no JSON
            return
        check_fields(raw_request.url.path, body)

    return validate_json_request


PATCHES = (
    Patch(
        target="lmdeploy.serve.utils.server_utils:validate_json_request",
        why="every endpoint runs it before its own code, which drops fields without a word",
        signature="(raw_request)",
        build=_validate,
        versions=FAULTY,
        essential=False,
    ),
)


@replaces(
    "lmdeploy.serve.openai.responses.request:check_request",
    why="drops the penalties and the reasoning effort, which its chats have",
    when=activation.is_on,
    versions=FAULTY,
    essential=False,
)
def responses_request(original: Original, request: Any, server_context: Any) -> Any:
    context, refused = original(request, server_context)
    if context is None:
        return context, refused
    values = {name: getattr(request, name) for name in ("presence_penalty", "frequency_penalty")}
    values["reasoning_effort"] = getattr(request.reasoning, "effort", None)
    changed = {name: value for name, value in values.items() if value is not None}
    fields = context.chat_request.model_dump(exclude_unset=True) | changed
    context.chat_request = type(context.chat_request)(**fields)
    return context, refused


@replaces(
    "lmdeploy.serve.openai.responses.request:warn_ignored_request_fields",
    why="says of fields that are served or refused that they are ignored",
    when=activation.is_on,
    versions=FAULTY,
    essential=False,
)
def warn_ignored_request_fields(original: Original, request: Any) -> None:
    """Warn of nothing: no field that asks for something is dropped."""
