"""Find the same tool calls and reasoning in a stream as in the whole text.

LMDeploy's parsers expect that each marker (``</tool_call>``, ``<parameter=``) arrives as a separate piece of text. But
a piece may end inside a marker, if the marker has several tokens or if text was held back for a stop string. LMDeploy
then takes the marker for arguments or content. Here all text, streamed or whole, is split again before it is parsed, so
that each marker is a piece.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.patching import Original

_PIECES = "_dlinfer_pieces"
"""Attribute of LMDeploy's response parser that holds the parser's Pieces."""


class Pieces:
    """Splits streamed text at its markers. Text that may be the beginning of a marker is held back.

    markers: the texts of all markers.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = sorted({marker for marker in markers if marker}, key=len, reverse=True)
        self._begins = re.compile("|".join(re.escape(first) for first in {each[0] for each in self._markers}))
        self._text = ""

    def feed(self, text: str, final: bool) -> Iterator[str]:
        """Take more text. Yield each complete marker, and the text between markers, as separate pieces.

        final: whether no more text follows. Then the text that was held back is yielded too.
        """
        self._text += text
        done = at = 0
        while match := self._begins.search(self._text, at):
            at = match.start()
            rest = self._text[at : at + len(self._markers[0])]
            whole = next((marker for marker in self._markers if rest.startswith(marker)), None)
            longer = (each for each in self._markers if len(each) > len(rest) and each.startswith(rest))
            if not final and next(longer, None) is not None:
                break
            if whole is None:
                at += 1
                continue
            if at > done:
                yield self._text[done:at]
            yield whole
            done = at = at + len(whole)
        else:
            at = len(self._text)
        if at > done:
            yield self._text[done:at]
        self._text = self._text[at:]


def _markers(parser: Any) -> list[str]:
    """Return the markers that the tool parser and the reasoning parser of a response parser look for."""
    markers: list[str] = []
    tool, reasoning = parser.tool_parser, parser.reasoning_parser
    if tool is not None:
        markers += [tool.get_tool_open_tag() or "", tool.get_tool_close_tag() or ""]
        names = (name for name in dir(type(tool)) if not name.startswith("_"))
        values = (getattr(type(tool), name) for name in names)
        markers += [value for value in values if isinstance(value, str) and value.startswith("<")]
        sign = getattr(tool, "dsml_token", None)
        if sign is not None:
            markers += [f"<{sign}invoke", f"</{sign}invoke>", f"<{sign}parameter", f"</{sign}parameter>"]
    if reasoning is not None:
        markers += [reasoning.get_reasoning_open_tag() or "", reasoning.get_reasoning_close_tag() or ""]
    return markers


@corrects(
    "lmdeploy.serve.parsers.response_parser:BaseResponseParser.stream_chunk",
    why="treats a marker as text if it arrives in two pieces",
    upstream="https://github.com/InternLM/lmdeploy/pull/4755",
)
def _stream_chunk(
    original: Original, self: Any, delta_text: str, delta_token_ids: list[int], **kwargs: Any
) -> Any:
    if self.tool_parser is None and self.reasoning_parser is None:
        return original(self, delta_text, delta_token_ids, **kwargs)
    pieces = getattr(self, _PIECES, None)
    if pieces is None:
        pieces = Pieces(_markers(self))
        setattr(self, _PIECES, pieces)
    final = bool(kwargs.pop("final", False))
    *texts, last = list(pieces.feed(delta_text, final)) or [""]
    deltas: list[Any] = []
    for text in texts:
        deltas += original(self, text, [], final=False, **kwargs)
    if not last and not final and (delta_text or delta_token_ids):
        # LMDeploy's method looks for no further tool call after a piece without text.
        self._update_reasoning_tokens(delta_token_ids)
        return deltas
    return deltas + original(self, last, delta_token_ids, final=final, **kwargs)
