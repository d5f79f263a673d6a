"""Refuses request fields that LMDeploy silently ignores, with HTTP status 400, unless they have a neutral value.

LMDeploy 0.18 declares some of these fields, but does not use them. It does not know the others, which belong to
OpenAI's, Anthropic's or vLLM's protocol. Fields that affect no answer (``user``, ``metadata``, ``store``) are accepted.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.request.http_errors import shown
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.activation import corrects, refuse
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Original, Patch

_NEUTRAL: tuple[tuple[Any, str], ...] = (
    (0, "min_tokens min_new_tokens min_p presence_penalty frequency_penalty top_logprobs"),
    (1, "best_of length_penalty n repetition_penalty"),
    (
        False,
        "use_beam_search echo continue_final_message with_cache preserve_cache logprobs return_token_ids",
    ),
    (False, "ignore_eos"),
    (True, "add_generation_prompt"),
    ([], "bad_words allowed_token_ids logits_processors functions stop_token_ids documents mcp_servers stop"),
    ([], "include"),
    (["reasoning.encrypted_content"], "include"),
    (["text"], "modalities"),
    ({}, "logit_bias sampling_params"),
    ({"type": "text"}, "response_format"),
    ("", "suffix"),
    ("none", "function_call"),
    ("auto", "function_call"),
    ("float", "encoding_format"),
    ("medium", "verbosity"),
)
"""Pairs (neutral value, fields that may have this value). null is neutral for every field."""

_VLLM = (
    "best_of use_beam_search length_penalty min_tokens bad_words allowed_token_ids prompt_logprobs "
    "truncate_prompt_tokens logits_processors structured_outputs guided_json guided_regex guided_choice guided_grammar "
)
"""Fields that vLLM adds to OpenAI's protocol."""

_NAMES = {
    "/v1/chat/completions": f"{_VLLM} functions function_call modalities audio web_search_options verbosity "
    "stop_token_ids echo chat_template add_generation_prompt continue_final_message documents",
    "/v1/completions": f"{_VLLM} suffix response_format logit_bias migration_request with_cache preserve_cache",
    "/generate": f"{_VLLM} n seed min_new_tokens presence_penalty frequency_penalty logit_bias response_format "
    "sampling_params",
    "/v1/responses": f"{_VLLM} include logit_bias max_tool_calls top_logprobs logprobs n min_new_tokens "
    "stop_token_ids return_token_ids",
    "/v1/messages": f"{_VLLM} output_format mcp_servers container seed stop min_new_tokens min_p presence_penalty "
    "frequency_penalty repetition_penalty logit_bias response_format stop_token_ids ignore_eos",
    "/pooling": "encoding_format dimensions",
    "/abort_request": "finished_reason abort_message",
}
UNREAD = {
    path: {name: [value for value, fields in _NEUTRAL if name in fields.split()] for name in names.split()}
    for path, names in _NAMES.items()
}
"""Endpoint -> field that LMDeploy ignores -> the field's neutral values, besides null."""

_NESTED = (("text", "verbosity", ["medium"]), ("reasoning", "effort", ["low", "medium", "high"]))
"""Fields of /v1/responses with a nested field, as (field, nested field, served values of the nested field)."""


def check_fields(path: str, body: Any) -> None:
    """Raise UnsupportedFeatureError for the first field of a request that LMDeploy would ignore.

    path: the endpoint's path. body: the request's JSON body.
    """
    if not isinstance(body, dict):
        return
    for field, neutral in UNREAD.get(path, {}).items():
        # best_of=n asks for nothing: all n generated answers are returned.
        if field != "best_of" or body.get(field) != (body.get("n") or 1):
            _check(path, field, body.get(field), neutral)
    for field, inner, served in _NESTED if path == "/v1/responses" else ():
        if isinstance(body.get(field), dict):
            _check(path, f"{field}.{inner}", body[field].get(inner), served)


def _check(path: str, field: str, value: Any, neutral: list[Any]) -> None:
    is_bool = isinstance(value, bool)  # True == 1 in Python, but True is not the neutral 1
    if value is None or any(value == each and (isinstance(each, bool) or not is_bool) for each in neutral):
        return
    instead = f" or give {' or '.join(map(repr, neutral))}" if neutral else ""
    raise refuse(f"{field}={shown(value)} in {path}", f"leave {field} out{instead}")


def _validate(original: Original) -> Any:
    from fastapi import Request

    async def validate_json_request(raw_request: Request) -> None:  # FastAPI reads this signature
        original(raw_request)
        if not activation.is_on() or raw_request.url.path not in UNREAD:
            return
        try:
            body = await raw_request.json()
        except ValueError:  # FastAPI reports invalid JSON itself
            return
        check_fields(raw_request.url.path, body)

    return validate_json_request


PATCHES = (
    Patch(
        target="lmdeploy.serve.utils.server_utils:validate_json_request",
        why="checks only the content type, and the endpoints silently ignore fields that they do not serve",
        signature="(raw_request)",
        build=_validate,
        versions=FAULTY,
        essential=False,
    ),
)


@corrects(
    "lmdeploy.serve.openai.responses.request:check_request",
    why="drops the penalties and the reasoning effort, which chat requests have",
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


@corrects(
    "lmdeploy.serve.openai.responses.request:warn_ignored_request_fields",
    why="warns that fields are ignored, though dlinfer serves or refuses them",
    essential=False,
)
def warn_ignored_request_fields(original: Original, request: Any) -> None:
    """Log nothing, because a request with ignored fields has been refused before."""
