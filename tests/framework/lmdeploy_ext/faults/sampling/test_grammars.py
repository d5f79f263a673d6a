"""Guided answers hold only characters that text has, and in JSON's strings only those that JSON allows in them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from transformers import PreTrainedTokenizerFast

from examples.tiny_models.build import build
from tests.serve.storm import SCHEMAS

BOUNDED = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
FREE = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORBIDDEN = [chr(code) for code in range(0x20)]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Any:
    PytorchEngineConfig(device_type="cpu")
    from lmdeploy.pytorch.engine.guided_process import GuidedDecodingManager

    folder: Path = tmp_path_factory.mktemp("models") / "qwen2"
    build("qwen2", folder)
    return GuidedDecodingManager(PreTrainedTokenizerFast.from_pretrained(folder), None)


def style(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    if kind == "schema":
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "structural_tag", "format": {"type": "tag", "begin": "", "content": content, "end": ""}}


def allowed_in_a_string(manager: Any, session: int, response_format: dict[str, Any]) -> list[str]:
    """Which characters, each one token, may come behind the beginning of a string."""
    matcher = manager.get_processor(session, 0, response_format)
    assert matcher.accept_string('{"a": "b')
    mask = manager.allocate_batched_bitmap(1)
    manager.fill_bitmap(matcher, mask, 0)
    words = mask[0].tolist()
    found = [None] * 256
    for token, text in enumerate(manager.compiler.compile_regex("x").tokenizer_info.decoded_vocab):
        if len(text) == 1:
            found[text[0]] = words[token // 32] >> token % 32 & 1
    assert None not in found[:0x80], "the tokenizer has a token for each byte"
    return [chr(code) for code in range(0x80) if found[code]]


@pytest.mark.parametrize("kind", ["schema", "tag"])
@pytest.mark.parametrize("schema", [BOUNDED, FREE])
def test_no_control_characters(manager: Any, kind: str, schema: dict[str, Any]):
    allowed = allowed_in_a_string(manager, hash((kind, str(schema))), style(kind, schema))
    assert not set(allowed) & set(FORBIDDEN)
    assert {"x", " ", '"', "~"} <= set(allowed)
    for character in set(allowed) - {'"', "\\"}:
        assert json.loads(f'{{"a": "b{character}"}}') == {"a": f"b{character}"}


def matcher(manager: Any, response_format: dict[str, Any], *, own: bool = False) -> Any:
    """A matcher of ours, or of xgrammar's own grammar."""
    import xgrammar
    from lmdeploy import _guided_decoding

    build: Any = _guided_decoding.compile_response_format
    return xgrammar.GrammarMatcher((build.__wrapped__ if own else build)(manager.compiler, response_format))


def pattern(text: str) -> dict[str, Any]:
    return {"type": "regex_schema", "regex_schema": text}


HALF = b"\xed\xa0\x80"  # of a surrogate pair, encoded as if it were a character
STYLES = [style("schema", BOUNDED), style("schema", FREE), style("tag", BOUNDED)]


@pytest.mark.parametrize("response_format", STYLES)
def test_xgrammars_own_allows_surrogates(manager: Any, response_format: dict[str, Any]):
    """Where this fails xgrammar has mended it, and that part of the patch may go."""
    assert matcher(manager, response_format, own=True).accept_string(b'{"a": "' + HALF)
    assert not matcher(manager, response_format).accept_string(b'{"a": "' + HALF)
    assert matcher(manager, response_format).accept_string('{"a": "\ud55c\uae00\ue000\U0010ffff')


def test_xgrammars_own_allows_control_characters(manager: Any):
    """When this fails xgrammar has mended it, and that part of the patch may go."""
    assert matcher(manager, style("schema", BOUNDED), own=True).accept_string('{"a": "b\x1a')


@pytest.mark.parametrize("text", [".{3}", "[^x]+", r'[a-z]*[^"\\\r\n]'])
def test_patterns_have_no_surrogates_and_keep_control_characters(manager: Any, text: str):
    assert matcher(manager, pattern(text), own=True).accept_string(HALF)
    assert not matcher(manager, pattern(text)).accept_string(HALF)
    assert matcher(manager, pattern(text)).accept_string("\ud55c")
    assert matcher(manager, pattern(text)).accept_string("\t")


def test_a_class_within_a_string_is_no_class(manager: Any):
    text = '[^"\\\r\n] and [^x] and \U0010ffff'
    constant = style("schema", {"const": text})
    answer = json.dumps(text, ensure_ascii=False)
    assert matcher(manager, constant, own=True).accept_string(answer)
    assert matcher(manager, constant).accept_string(answer)
    escaped = pattern('\\[\\^"\\\\\\r\\n\\]')
    assert matcher(manager, escaped).accept_string('[^"\\\r\n]')


TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "json_schema", "json_schema": BOUNDED},
    "end": "</a>",
}
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "any text": ({"type": "any_text", "excludes": ["<a>"]}, "<b>\t"),
    "a constant": ({"type": "const_string", "value": 'a"b\\[^x]\n'}, 'a"b\\[^x]\n'),
    "a pattern": ({"type": "regex", "pattern": "[^x]{3}.*"}, "abcx"),
    "a grammar": ({"type": "grammar", "grammar": 'root ::= "a" [^x] | root "b"'}, "acbb"),
    "several": (
        {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, TAG]},
        'x<a>{"a": "b',
    ),
    "tags": ({"type": "triggered_tags", "triggers": ["<"], "tags": [TAG]}, 'x <a>{"a": "b'),
    "tags in turn": ({"type": "tags_with_separator", "tags": [TAG], "separator": "\n"}, '<a>{"a": "b'),
    "parameters in XML": ({"type": "qwen_xml_parameter", "json_schema": BOUNDED}, "<parameter=a>b"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_of_structural_tags(manager: Any, name: str):
    form, text = FORMATS[name]
    for own in (True, False):
        assert matcher(manager, {"type": "structural_tag", "format": form}, own=own).accept_string(text)


def test_a_format_whose_text_xgrammar_does_not_read(manager: Any):
    tokens = {"type": "structural_tag", "format": {"type": "any_tokens"}}
    assert matcher(manager, tokens).accept_token(5)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_all_else_stays(manager: Any, number: int):
    """Answers drawn at random by either grammar follow the other."""
    response_format = style("schema", SCHEMAS[number])
    for seed in range(6):
        drawn, other = matcher(manager, response_format), matcher(manager, response_format, own=True)
        if seed % 2:
            drawn, other = other, drawn
        answer = draw(manager, drawn, random.Random(seed))
        assert other.accept_string(answer)
        assert drawn.is_terminated() == other.is_completed()


def draw(manager: Any, matcher: Any, rng: random.Random) -> bytes:
    """Up to 200 tokens of printable ASCII that a matcher allows, each as likely."""
    vocabulary = manager.compiler.compile_regex("x").tokenizer_info.decoded_vocab
    printable = [
        number for number, text in enumerate(vocabulary) if all(0x20 <= byte < 0x7F for byte in text)
    ]
    mask, answer = manager.allocate_batched_bitmap(1), b""
    for _ in range(200):
        manager.fill_bitmap(matcher, mask, 0)
        words = mask[0].tolist()
        allowed = [number for number in printable if words[number // 32] >> number % 32 & 1]
        token = rng.choice(allowed or matcher.stop_token_ids)
        assert matcher.accept_token(token)
        if matcher.is_terminated():
            break
        answer += vocabulary[token]
    return answer
