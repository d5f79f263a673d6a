"""Make the grammar of a guided answer forbid halves of surrogate pairs, and control characters in JSON strings.

xgrammar counts half of a surrogate pair as a character. But a decoder writes three replacement characters for it, and
the string then exceeds its ``maxLength``. In strings of bounded length xgrammar allows tabs and other control
characters, which JSON forbids.

We correct both faults in the grammar's text form. If xgrammar cannot read the corrected text back, the grammar stays as
it is. A schema's ``pattern`` stays as it is too, because the text form does not contain it.
"""

import functools
import re
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original

_LITERALS = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
"""Matches character classes, and strings as well, so that ``[...]`` inside a string is not taken for a class."""
_SURROGATES = r"\ud800-\udfff"
_ANY, _ANY_BUT_SURROGATES = r"\0-\U0010ffff", r"\0-\ud7ff\ue000-\U0010ffff"
_IN_BOUNDED_STRINGS, _IN_STRINGS = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"


def _mended_literal(match: re.Match[str], is_json: bool) -> str:
    literal = match[0]
    if is_json and literal == _IN_BOUNDED_STRINGS:
        literal = _IN_STRINGS
    if literal.startswith("[^"):
        return f"{literal[:-1]}{_SURROGATES}]"
    return literal.replace(_ANY, _ANY_BUT_SURROGATES) if literal.startswith("[") else literal


def mended(grammar: str, is_json: bool) -> str:
    """Return the text of a grammar that forbids surrogates and, if ``is_json``, control characters in strings.

    grammar: the text of the grammar that xgrammar made.
    """
    return _LITERALS.sub(functools.partial(_mended_literal, is_json=is_json), grammar)


@corrects(
    "lmdeploy._guided_decoding:compile_response_format",
    why="allows halves of surrogate pairs in an answer, and raw control characters in JSON strings of bounded length",
    upstream="https://github.com/mlc-ai/xgrammar/issues/800",
)
def _compile(original: Original, compiler: Any, response_format: dict[str, Any]) -> Any:
    from lmdeploy._guided_decoding import _grammar_source
    from xgrammar import Grammar

    kind, source = _grammar_source(response_format)
    read = {
        "json_schema": Grammar.from_json_schema,
        "regex_schema": Grammar.from_regex,
        "structural_tag": Grammar.from_structural_tag,
    }.get(kind)
    if read is None:
        return original(compiler, response_format)
    try:
        grammar = Grammar.from_ebnf(mended(str(read(source)), is_json=kind != "regex_schema"))
    except RuntimeError:
        # xgrammar cannot read back the text of some formats of tokens, or refuses the format itself.
        return original(compiler, response_format)
    return compiler.compile_grammar(grammar)
