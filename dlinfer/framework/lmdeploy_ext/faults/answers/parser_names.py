"""Accept parser names with a dot, such as ``--reasoning-parser deepseek-v3.2``.

LMDeploy 0.18 looks parsers up in mmengine's registries. These read the part of a name before a dot as the name of
another registry.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original


@corrects(
    "lmdeploy.serve.parsers.response_parser:validate_parser_names",
    why="accepts a parser name with a dot, which the registry cannot look up",
    essential=False,
)
def _validate(
    original: Original,
    reasoning_parser_name: str | None = None,
    tool_parser_name: str | None = None,
    *,
    warn_legacy: bool = True,
) -> tuple[str | None, str | None]:
    from lmdeploy.serve.parsers.reasoning_parser import ReasoningParserManager
    from lmdeploy.serve.parsers.tool_parser import ToolParserManager

    names = original(reasoning_parser_name, tool_parser_name, warn_legacy=warn_legacy)
    return _without_dot(ReasoningParserManager, names[0]), _without_dot(ToolParserManager, names[1])


def _without_dot(registry: Any, name: str | None) -> str | None:
    """Return ``name`` if it has no dot, else another name of the same parser that has no dot."""
    if name is None or "." not in name:
        return name
    parser = registry.module_dict[name]
    return next(other for other, each in registry.module_dict.items() if each is parser and "." not in other)
