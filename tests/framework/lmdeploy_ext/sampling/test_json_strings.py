"""Strings of bounded length hold no character that JSON forbids in them."""

import json
from pathlib import Path
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from transformers import PreTrainedTokenizerFast

from examples.tiny_models.build import build

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


def test_xgrammars_own_allows_them(manager: Any):
    """When this fails xgrammar has mended it, and the patch may go."""
    from lmdeploy import _guided_decoding

    original: Any = _guided_decoding.compile_response_format
    import xgrammar

    matcher = xgrammar.GrammarMatcher(original.__wrapped__(manager.compiler, style("schema", BOUNDED)))
    assert matcher.accept_string('{"a": "b\x1a')
