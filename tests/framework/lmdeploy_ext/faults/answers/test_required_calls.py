"""A model that would rather write blanks has to call the function, whatever the parser's syntax."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from transformers import PreTrainedTokenizerFast

from examples.tiny_models.build import build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import xgrammar

PARSERS = "deepseek-v32 deepseek-v4 glm47 internlm interns2-preview kimi_k2 qwen3 qwen3coder".split()
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "maximum": 9, "minimum": 1},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ping"}},
]
MOST = 600


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    build("qwen2", folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def parser_class(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[Any]:
    PytorchEngineConfig(device_type="cpu")
    from lmdeploy.serve.parsers.response_parser import BaseResponseParser

    class Parser(BaseResponseParser):
        pass

    Parser.set_parsers(tool_parser_name=request.param, tokenizer=tokenizer)
    yield Parser


def asked(choice: Any, **fields: Any) -> Any:
    from lmdeploy.serve.openai.protocol import ChatCompletionRequest

    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "tiny", "messages": messages, "tools": TOOLS, "tool_choice": choice}
    return ChatCompletionRequest.model_validate(body | fields)


def blanks_where_it_may(tokenizer: Any, style: dict[str, Any]) -> tuple[str, bool]:
    """What a model answers under a grammar that likes blanks best, and then the last token that it may write.

    It ends as soon as it may; the second value is false where it is cut off before.
    """
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    from lmdeploy._guided_decoding import compile_response_format

    compiled = compile_response_format(xgrammar.GrammarCompiler(vocabulary), style)
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)
    decoded = vocabulary.decoded_vocab
    tokens: list[int] = []
    for _ in range(MOST):
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [t for t in range(vocabulary.vocab_size) if words[t // 32] >> t % 32 & 1]
        if set(vocabulary.stop_token_ids) & set(allowed):
            return b"".join(decoded[token] for token in tokens).decode(), True
        blank = [token for token in allowed if decoded[token] and not decoded[token].strip()]
        tokens.append((blank or allowed)[-1])
        assert matcher.accept_token(tokens[-1])
    return b"".join(decoded[token] for token in tokens).decode(errors="replace"), False


def calls(parser: Any, text: str) -> list[tuple[str, str]]:
    """(function, arguments in JSON) of each; the last one may be cut off."""
    _, made, _ = parser.parse_complete(text)
    return [(call.function.name, call.function.arguments) for call in made or ()]


@pytest.mark.parametrize("parser_class", PARSERS, indirect=True)
@pytest.mark.parametrize("name", ["weather", "ping"])
def test_the_named_function_is_called_once(parser_class: Any, tokenizer: Any, name: str):
    parser = parser_class(asked({"type": "function", "function": {"name": name}}))
    text, ended = blanks_where_it_may(tokenizer, parser.request.response_format)
    assert ended, text
    ((called, arguments),) = calls(parser, text)
    assert called == name
    check(called, arguments)


@pytest.mark.parametrize("parser_class", PARSERS, indirect=True)
def test_some_function_is_called(parser_class: Any, tokenizer: Any):
    parser = parser_class(asked("required"))
    text, _ = blanks_where_it_may(tokenizer, parser.request.response_format)
    (called, arguments), *_ = calls(parser, text)
    check(called, arguments)


@pytest.mark.parametrize("parser_class", PARSERS, indirect=True)
def test_one_of_the_allowed_functions_is_called(parser_class: Any, tokenizer: Any):
    allowed = {"mode": "required", "tools": [TOOLS[1]]}
    parser = parser_class(asked({"type": "allowed_tools", "allowed_tools": allowed}))
    text, _ = blanks_where_it_may(tokenizer, parser.request.response_format)
    (called, arguments), *_ = calls(parser, text)
    assert called == "ping"
    check(called, arguments)


def check(called: str, text: str) -> None:
    """The XML formats have blanks around values, as Qwen3-Coder writes them, which parsers pass on."""
    arguments = json.loads(text)
    if called == "ping":
        assert arguments == {}
    else:
        assert arguments["city"].strip() in ("Rome", "Oslo")
        assert int(arguments["days"]) in range(1, 10)


@pytest.mark.parametrize("parser_class", ["qwen3"], indirect=True)
def test_no_call_is_required_otherwise(parser_class: Any):
    for choice in (
        "auto",
        "none",
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[:1]}},
    ):
        assert parser_class(asked(choice)).request.response_format is None


@pytest.mark.parametrize("parser_class", ["qwen3"], indirect=True)
def test_calls_that_are_not_parallel_are_one(parser_class: Any):
    parallel = parser_class(asked("required")).request.response_format["format"]
    single = parser_class(asked("required", parallel_tool_calls=False)).request.response_format["format"]
    assert (parallel["stop_after_first"], single["stop_after_first"]) == (False, True)


@pytest.mark.parametrize("parser_class", ["qwen3"], indirect=True)
def test_a_function_that_there_is_not(parser_class: Any):
    with pytest.raises(ValueError, match=r"'frob', but `tools` has: weather, ping"):
        parser_class(asked({"type": "function", "function": {"name": "frob"}}))


@pytest.mark.parametrize("parser_class", ["llama3"], indirect=True)
def test_a_parser_without_a_grammar_says_so(parser_class: Any):
    with pytest.raises(ValueError, match="does not support"):
        parser_class(asked({"type": "function", "function": {"name": "ping"}}))
