"""Fields of requests that no code of LMDeploy's reads: a value that asks for something gets a 400 with its name.

LMDeploy 0.18 declares some of them and drops them; others belong to OpenAI's, Anthropic's or vLLM's protocol and are
dropped as unknown. A field that changes no answer (``user``, ``metadata``, ``store``) is taken as it is.
"""

import functools
from collections.abc import Callable
from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.refusing import refuse
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Patch

_VLLM: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""What vLLM adds to OpenAI's protocol."""

UNREAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/chat/completions": _VLLM
    | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "verbosity": ("medium",),
        "stop_token_ids": ([],),
        "echo": (False,),
        "chat_template": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "documents": ([],),
    },
    "/v1/completions": _VLLM
    | {
        "suffix": ("",),
        "response_format": ({"type": "text"},),
        "logit_bias": ({},),
        "migration_request": (),
        "with_cache": (False,),
        "preserve_cache": (False,),
    },
    "/generate": _VLLM
    | {
        "n": (1,),
        "seed": (),
        "min_new_tokens": (0,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "sampling_params": ({},),
    },
    "/v1/responses": _VLLM
    | {
        "include": ([], ["reasoning.encrypted_content"]),
        "logit_bias": ({},),
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "logprobs": (False,),
        "n": (1,),
        "min_new_tokens": (0,),
        "stop_token_ids": ([],),
        "return_token_ids": (False,),
    },
    "/v1/messages": _VLLM
    | {
        "output_format": (),
        "mcp_servers": ([],),
        "container": (),
        "seed": (),
        "stop": ([],),
        "min_new_tokens": (0,),
        "min_p": (0,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "stop_token_ids": ([],),
        "ignore_eos": (False,),
    },
    "/pooling": {"encoding_format": ("float",), "dimensions": ()},
    "/abort_request": {"finished_reason": (), "abort_message": ()},
}
"""Path -> field that nobody reads -> values that ask for nothing; None is one of each."""


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


def _validate(original: Callable[..., Any]) -> Callable[..., Any]:
    from fastapi import Request

    async def validate_json_request(raw_request: Request) -> None:  # FastAPI reads this signature
        original(raw_request)
        if activation.active() is None or raw_request.url.path not in UNREAD:
            return
        try:
            body = await raw_request.json()
        except ValueError:  # no JSON, which FastAPI says
            return
        check_fields(raw_request.url.path, body)

    return validate_json_request


def _responses_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check_request(request: Any, server_context: Any) -> Any:
        context, refused = original(request, server_context)
        if activation.active() is None or context is None:
            return context, refused
        changed = {
            field: value
            for field in ("presence_penalty", "frequency_penalty")
            if (value := getattr(request, field)) is not None
        }
        effort = getattr(request.reasoning, "effort", None)
        if effort is not None:
            changed["reasoning_effort"] = effort
        fields = context.chat_request.model_dump(exclude_unset=True) | changed
        context.chat_request = type(context.chat_request)(**fields)
        return context, refused

    return check_request


def _warn(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def warn_ignored_request_fields(request: Any) -> None:
        if activation.active() is None:  # here no field that asks for something is dropped
            original(request)

    return warn_ignored_request_fields


PATCHES = (
    Patch(
        target="lmdeploy.serve.utils.server_utils:validate_json_request",
        why="every endpoint runs it before its own code, which drops fields in silence",
        signature="(raw_request)",
        build=_validate,
        versions=FAULTY,
        essential=False,
    ),
    Patch(
        target="lmdeploy.serve.openai.responses.request:check_request",
        why="drops the penalties and the reasoning effort, which its chats have",
        signature="(request, server_context)",
        build=_responses_request,
        versions=FAULTY,
        essential=False,
    ),
    Patch(
        target="lmdeploy.serve.openai.responses.request:warn_ignored_request_fields",
        why="says of fields that are served or refused that they are ignored",
        signature="(request)",
        build=_warn,
        versions=FAULTY,
        essential=False,
    ),
)
