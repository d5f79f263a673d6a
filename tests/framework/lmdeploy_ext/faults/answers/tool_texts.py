"""What models write for calls of tools: one function for each format of LMDeploy's tool parsers."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from lmdeploy import deepseek_v4_encoding
from lmdeploy.deepseek_v32_encoding import dsml_token

Call = tuple[str, dict[str, Any]]

CALLS: list[Call] = [
    ("weather", {"city": "Zürich 😀", "note": 'a {"b": [1, "}"]} </x> \\ "q"\n\ttab'}),
    ("now", {}),
    ("add", {"a": 1, "b": [1, {"c": None}], "d": True, "e": -1.5}),
]
"""Unicode, braces and quotes in strings, no arguments at all, and every type of JSON."""

_TYPES = {
    "weather": {"city": "string", "note": "string"},
    "now": {},
    "add": {"a": "integer", "b": "array", "d": "boolean", "e": "number"},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": one} for key, one in types.items()},
            },
        },
    }
    for name, types in _TYPES.items()
]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def qwen(calls: Sequence[Call]) -> str:
    blocks = (_json({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def internlm(calls: Sequence[Call]) -> str:
    blocks = (_json({"name": name, "parameters": arguments}) for name, arguments in calls)
    return "\n".join(f"<|action_start|><|plugin|>{block}<|action_end|>" for block in blocks)


def llama3(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|python_tag|>{_json({'name': name, 'parameters': arguments})}" for name, arguments in calls
    )


def qwen_coder(calls: Sequence[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        inner = "".join(
            f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        blocks.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(blocks)


def glm(calls: Sequence[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        blocks.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(blocks)


def kimi(calls: Sequence[Call]) -> str:
    blocks = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"


def _dsml(block: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        lines = [f"\n\n<{dsml_token}{block}>"]
        for name, arguments in calls:
            lines.append(f'<{dsml_token}invoke name="{name}">')
            for key, value in arguments.items():
                kind = "true" if isinstance(value, str) else "false"
                begin = f'<{dsml_token}parameter name="{key}" string="{kind}">'
                lines.append(f"{begin}{_raw(value)}</{dsml_token}parameter>")
            lines.append(f"</{dsml_token}invoke>")
        return "\n".join([*lines, f"</{dsml_token}{block}>"])

    return write


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "qwen": qwen,
    "qwen2d5": qwen,
    "qwen3": qwen,
    "internlm": internlm,
    "intern-s1": internlm,
    "llama3": llama3,
    "qwen3coder": qwen_coder,
    "interns2-preview": qwen_coder,
    "glm47": glm,
    "kimi_k2": kimi,
    "kimi-k2": kimi,
    "deepseek-v32": _dsml("function_calls"),
    "deepseek-v4": _dsml(deepseek_v4_encoding.tool_calls_block_name),
}
"""Name of a parser of LMDeploy's -> its format."""
