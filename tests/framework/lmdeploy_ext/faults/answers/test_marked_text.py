"""Every tool and reasoning parser of LMDeploy's reads from a stream what it reads from the whole text.

The stream comes in all kinds of pieces: single characters, and random ones that cut markers anywhere.
"""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.serve.openai.protocol import ChatCompletionRequest
from lmdeploy.serve.parsers.reasoning_parser import ReasoningParserManager
from lmdeploy.serve.parsers.response_parser import BaseResponseParser
from lmdeploy.serve.parsers.tool_parser import ToolParserManager
from lmdeploy.serve.parsers.tool_parser.tool_parser import ToolParser

from dlinfer.framework.lmdeploy_ext.faults.answers.marked_text import Pieces
from tests.framework.lmdeploy_ext.faults.answers.tool_texts import CALLS, TOOLS, WRITERS

Read = tuple[str | None, list[tuple[str, str]], str | None]
"""Content, names and arguments of calls, reasoning."""


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    PytorchEngineConfig(device_type="cpu")


def parser(tool: str | None, reasoning: str | None) -> Any:
    class Parser(BaseResponseParser):
        pass

    Parser.set_parsers(reasoning, tool)
    options: dict[str, Any] = {"tools": TOOLS} if tool else {}
    if reasoning:
        options["chat_template_kwargs"] = {"enable_thinking": True}
    return Parser(
        ChatCompletionRequest(model="tiny", messages=[{"role": "user", "content": "hi"}], **options)
    )


def streamed(tool: str | None, reasoning: str | None, pieces: Sequence[str]) -> Read:
    reader = parser(tool, reasoning)
    content, thought, calls = "", "", []
    for number in range(len(pieces) + 1):
        last = number == len(pieces)
        for delta, _ in reader.stream_chunk("" if last else pieces[number], [] if last else [7], final=last):
            content += delta.content or ""
            thought += delta.reasoning_content or ""
            calls += delta.tool_calls or []
    joined = [(call.function.name, call.function.arguments) for call in ToolParser.build_tool_calls(calls)]
    return content or None, joined, thought or None


def whole(tool: str | None, reasoning: str | None, text: str) -> Read:
    content, calls, thought = parser(tool, reasoning).parse_complete(text, [7])
    return content, [(call.function.name, call.function.arguments) for call in calls or []], thought


def cut(text: str, rng: random.Random) -> Iterator[list[str]]:
    yield list(text)
    for count in (1, 3, 10, 10, 40, 40):
        at = sorted(rng.choices(range(len(text) + 1), k=count))
        yield [text[begin:end] for begin, end in zip([0, *at], [*at, len(text)], strict=True)]


def test_each_parser_has_a_format_here():
    """A parser that a release adds is to be read too."""
    assert set(WRITERS) == set(ToolParserManager.module_dict)


@pytest.mark.parametrize("tool", WRITERS)
def test_calls(tool: str):
    rng = random.Random(tool)
    text = WRITERS[tool](CALLS)
    content, calls, thought = whole(tool, None, text)
    assert (content, thought) == (None, None)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS
    for pieces in cut(text, rng):
        assert streamed(tool, None, pieces) == (content, calls, thought), pieces


@pytest.mark.parametrize("tool", WRITERS)
def test_calls_behind_reasoning(tool: str):
    rng = random.Random(tool)
    text = "is 1 < 2? <b>\n</think>I call" + WRITERS[tool](CALLS[1:])
    content, calls, thought = whole(tool, "default", text)
    assert (content, thought) == ("I call", "is 1 < 2? <b>\n")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS[1:]
    for pieces in cut(text, rng):
        assert streamed(tool, "default", pieces) == (content, calls, thought), pieces


@pytest.mark.parametrize("tool", WRITERS)
def test_calls_cut_by_length(tool: str):
    rng = random.Random(tool)
    text = WRITERS[tool](CALLS)
    for end in range(1, len(text), 11):
        read = whole(tool, None, text[:end])
        complete = [(name, json.loads(arguments)) for name, arguments in read[1][:-1]]
        assert complete == CALLS[: len(complete)]
        for pieces in cut(text[:end], rng):
            assert streamed(tool, None, pieces) == read, pieces


@pytest.mark.parametrize("reasoning", ReasoningParserManager.module_dict)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a < b</think>done", ("done", "a < b")),
        ("<think>a</think>\n\nb", ("\n\nb", "a")),
        ("no end", (None, "no end")),
        ("a</thin", (None, "a</thin")),
        ("<think>", (None, None)),
        ("x</think>y<think>z</think>w", ("yw", "xz")),
    ],
)
def test_reasoning(reasoning: str, text: str, expected: tuple[str | None, str | None]):
    rng = random.Random(text)
    content, calls, thought = whole(None, reasoning, text)
    assert (content, thought) == expected
    for pieces in cut(text, rng):
        assert streamed(None, reasoning, pieces) == (content, calls, thought), pieces


@pytest.mark.parametrize("seed", range(50))
def test_pieces_join_to_the_text_and_markers_are_whole(seed: int):
    rng = random.Random(seed)
    markers = ["<a>", "<ab>", "\n\n<a", "</a>"]
    text = "".join(rng.choices([*markers, "<", "a", "\n", "/", ">", "x"], k=30))
    at_once = list(Pieces(markers).feed(text, final=True))
    assert "".join(at_once) == text
    for parts in cut(text, rng):
        pieces = Pieces(markers)
        found = [piece for part in parts for piece in pieces.feed(part, final=False)]
        found += pieces.feed("", final=True)
        assert [p for p in found if p in markers] == [p for p in at_once if p in markers]
        assert "".join(found) == text
