"""A guided answer whose schema bounds the length of strings is JSON: no raw control character in a string.

xgrammar writes such a string as any characters but quotes, backslashes and ends of lines. JSON forbids a tab and the
other control characters there as well, and a parser refuses the whole answer.
"""

import functools
from collections.abc import Callable
from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Patch

_BOUNDS = ('"maxLength"', '"minLength"')
_CONTROLS = frozenset(range(0x20)) - {ord("\n"), ord("\r")}
_NAME = "dlinfer_without_controls"  # the attribute of a compiler that holds its twin


def without_controls(compiler: Any) -> Any:
    """The twin of an xgrammar GrammarCompiler whose tokens have no control characters but ends of lines."""
    twin = getattr(compiler, _NAME, None)
    if twin is None:
        import xgrammar

        info = compiler.compile_regex("x").tokenizer_info  # which a compiler itself does not show
        twin = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(
                # a token without bytes is never allowed
                [b"" if _CONTROLS.intersection(token) else token for token in info.decoded_vocab],
                vocab_type=xgrammar.VocabType.RAW,
                vocab_size=info.vocab_size,
                stop_token_ids=info.stop_token_ids,
                add_prefix_space=info.add_prefix_space,
            )
        )
        setattr(compiler, _NAME, twin)
    return twin


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_response_format(compiler: Any, response_format: dict[str, Any]) -> Any:
        if activation.active() is not None:
            from lmdeploy._guided_decoding import _grammar_source

            kind, source = _grammar_source(response_format)
            if kind != "regex_schema" and any(bound in source for bound in _BOUNDS):
                return original(without_controls(compiler), response_format)
        return original(compiler, response_format)

    return compile_response_format


PATCHES = (
    Patch(
        target="lmdeploy._guided_decoding:compile_response_format",
        why="lets strings of bounded length hold raw control characters, so that an answer under a schema is no JSON",
        signature="(compiler, response_format)",
        build=_compile,
        versions=FAULTY,
    ),
)
