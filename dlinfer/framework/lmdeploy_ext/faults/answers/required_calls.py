"""Make the answer a call of the right function if the request requires a tool call, and limit the call's whitespace.

LMDeploy obeys ``tool_choice="required"``, but treats a named function or required ``allowed_tools`` as "auto". For a
function without parameters, LMDeploy's grammar allows any JSON value as arguments. It also lets a model write
whitespace between the parts of the JSON until the answer reaches its length limit.
"""

from collections.abc import Sequence
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original

_BLANKS = 2
"""The most consecutive whitespace characters between the parts of a call's arguments."""
_BOUNDED_PATTERNS = {r"\s*": rf"\s{{0,{_BLANKS}}}", r"\d+": r"\d{1,6}"}
"""Unbounded regex in LMDeploy's or xgrammar's format -> bounded regex.

The first is for the whitespace after the last call, the second for the index in a call's id, which some models write.
"""
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def callable_tools(request: Any) -> tuple[Sequence[Any], bool] | None:
    """Return (tools, whether only one call is allowed) if the request requires a call of one of these tools; else None.

    request: a ChatCompletionRequest. Raises ValueError if the request names a function that is not among its tools.
    """
    from lmdeploy.serve.openai.protocol import AllowedToolChoice, ToolChoice

    choice, tools = request.tool_choice, request.tools or []
    if choice == "required":
        return tools, False
    if isinstance(choice, AllowedToolChoice):
        names = {tool.get("function", {}).get("name") for tool in choice.allowed_tools.tools}
        chosen = [tool for tool in tools if tool.function.name in names]
        return (chosen, False) if choice.allowed_tools.mode == "required" else None
    if isinstance(choice, ToolChoice):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            known = ", ".join(tool.function.name for tool in tools) or "none"
            name = choice.function.name
            raise ValueError(f"`tool_choice` names the function {name!r}, but `tools` has: {known}.")
        return chosen, True
    return None


def bounded(style: Any, *, only_one: bool) -> Any:
    """Return a copy of xgrammar's structural tag with limits for whitespace and for the digits of a call's index.

    style: the structural tag, or a part of one. only_one: whether nothing may follow the first call.
    """
    if isinstance(style, list):
        return [bounded(part, only_one=only_one) for part in style]
    if not isinstance(style, dict):
        return style
    kind = style.get("type")
    if kind == "json_schema":
        return style | {"max_whitespace_cnt": _BLANKS}
    if kind == "regex":
        return style | {"pattern": _BOUNDED_PATTERNS.get(style["pattern"], style["pattern"])}
    copied = {name: bounded(part, only_one=only_one) for name, part in style.items()}
    return copied | {"stop_after_first": True} if only_one and "stop_after_first" in copied else copied


def _with_parameters(tool: Any) -> Any:
    """Return the tool, with the schema of an empty object as parameters if it has none, as in OpenAI's protocol."""
    if tool.function.parameters is not None:
        return tool
    function = tool.function.model_copy(update={"parameters": _NO_ARGUMENTS})
    return tool.model_copy(update={"function": function})


@corrects(
    "lmdeploy.serve.parsers.response_parser:BaseResponseParser.__init__",
    why="treats a tool_choice that names a function as 'auto', and lets a required call contain unlimited whitespace",
)
def _init(original: Original, self: Any, request: Any) -> None:
    required = callable_tools(request)
    if required is not None and not required[0]:
        raise ValueError("`tool_choice` requires a tool call, but `tools` has no tool that it allows.")
    original(self, request)
    if required is None:
        return
    if self.tool_parser is None:
        raise ValueError("`tool_choice` requires a tool call: start the server with --tool-call-parser.")
    only_one = required[1] or request.parallel_tool_calls is False
    tools = [_with_parameters(tool) for tool in required[0]]
    style = self.tool_parser.build_required_response_format(tools, reasoning=self.reasoning_enabled)
    update = {"response_format": bounded(style, only_one=only_one)}
    self.request = self.request.model_copy(update=update)
