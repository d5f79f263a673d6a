"""The official ``openai`` client against one server, whose texts are those of transformers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.harness import Lab
from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPTS = ["hello world, please introduce yourself", "the quick brown fox jumps over the lazy dog"]
GREEDY: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 24, "temperature": 0.0}


@pytest.fixture
def client(server: ApiServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def chat(client: openai.OpenAI, prompt: str) -> str:
    answer = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **GREEDY)
    content = answer.choices[0].message.content
    assert content
    return content


def complete(client: openai.OpenAI, prompt: str) -> str:
    return client.completions.create(prompt=prompt, **GREEDY).choices[0].text


@pytest.fixture(scope="module")
def expected(lab: Lab, model: Path) -> dict[str, str]:
    """Prompt -> transformers' greedy continuation of as many tokens, ends of sequence apart."""
    prompts = [*PROMPTS, *map(rendered, PROMPTS)]
    found = lab.reference(model, prompts=prompts, max_new_tokens=GREEDY["max_tokens"])
    tokenizer = lab.tokenizer(model)
    texts = [tokenizer.decode(found[f"tokens_{i}"].tolist()) for i in range(len(prompts))]
    return dict(zip(prompts, texts, strict=True))


def rendered(prompt: str) -> str:
    """A chat of one message, by the template that LMDeploy uses for a checkpoint that brings none."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def whole(text: str) -> str:
    """Text without what is left of a character whose last byte is a token that did not come any more."""
    return text.rstrip("\ufffd")


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_reach_the_engine(name: str, client: openai.OpenAI):
    """Whether they are right is seen in tests/e2e/test_sampling.py; a negative one makes this model repeat itself."""
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    options: dict[str, Any] = GREEDY | {"extra_body": {"ignore_eos": True}, "max_tokens": 60, name: -2.0}
    plain = GREEDY | {"extra_body": {"ignore_eos": True}, "max_tokens": 60}
    chats = [client.chat.completions.create(messages=messages, **each) for each in (plain, options)]
    assert chats[0].choices[0].message.content != chats[1].choices[0].message.content
    completions = [client.completions.create(prompt=PROMPTS[0], **each) for each in (plain, options)]
    assert completions[0].choices[0].text != completions[1].choices[0].text
    responses = [
        client.responses.create(
            model=MODEL_NAME,
            input=PROMPTS[0],
            max_output_tokens=60,
            temperature=0.0,
            extra_body={"ignore_eos": True} | penalty,
        )
        for penalty in ({}, {name: -2.0})
    ]
    assert responses[0].output_text == chats[0].choices[0].message.content
    assert responses[1].output_text == chats[1].choices[0].message.content


@pytest.mark.parametrize("prompt", PROMPTS)
def test_texts_are_those_of_transformers(prompt: str, client: openai.OpenAI, expected: dict[str, str]):
    options: dict[str, Any] = GREEDY | {"extra_body": {"ignore_eos": True}}
    text = client.completions.create(prompt=prompt, **options).choices[0].text
    messages: Any = [{"role": "user", "content": prompt}]
    said = client.chat.completions.create(messages=messages, **options).choices[0].message.content
    assert len(whole(expected[prompt])) > 10
    assert whole(text) == whole(expected[prompt])
    assert said is not None
    assert whole(said) == whole(expected[rendered(prompt)])


def test_models_names_the_served_model(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL_NAME]


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(messages=[{"role": "user", "content": PROMPTS[0]}], **GREEDY)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= GREEDY["max_tokens"]
    assert answer.choices[0].finish_reason == (
        "length" if answer.usage.completion_tokens == GREEDY["max_tokens"] else "stop"
    )


def test_completion(client: openai.OpenAI):
    answer = client.completions.create(prompt=PROMPTS[0], **GREEDY)
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0


def streamed_chat(client: openai.OpenAI, **options: Any) -> list[str]:
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    stream = client.chat.completions.create(messages=messages, stream=True, **GREEDY | options)
    return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]


def streamed_completion(client: openai.OpenAI, **options: Any) -> list[str]:
    stream = client.completions.create(prompt=PROMPTS[1], stream=True, **GREEDY | options)
    return [chunk.choices[0].text for chunk in stream if chunk.choices]


def test_streams_are_the_same_text(client: openai.OpenAI):
    assert "".join(streamed_chat(client)) == chat(client, PROMPTS[0])
    assert "".join(streamed_completion(client)) == complete(client, PROMPTS[1])


@pytest.mark.parametrize("ask", [streamed_chat, streamed_completion])
def test_a_stream_comes_in_pieces(ask: Callable[..., list[str]], client: openai.OpenAI):
    """LMDeploy joins what its server did not come to fetch meanwhile; that of many tokens never is one piece."""
    pieces = ask(client, max_tokens=400, extra_body={"ignore_eos": True})
    assert sum(bool(piece) for piece in pieces) > 1


def test_two_at_once_get_what_each_gets_alone(client: openai.OpenAI):
    alone = [chat(client, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda prompt: chat(client, prompt), PROMPTS * 4))
    assert together == alone * 4


def test_health(server: ApiServer):
    assert server.request("GET", "/health")[0] == 200


def test_client_raises_its_own_error_for_an_unknown_model(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="hello")


@pytest.mark.parametrize("option", [{"top_k": 10**6}, {"stop_token_ids": [10**9]}])
def test_sampling_beyond_the_vocabulary_is_served(option: dict[str, Any], client: openai.OpenAI):
    """LMDeploy 0.18 itself: torch.topk or Tensor.gather raises in the engine's loop, which ends the engine."""
    body = {**option, "ignore_eos": True}  # which may be drawn as any other
    answer = client.completions.create(model=MODEL_NAME, prompt="hello", max_tokens=4, extra_body=body)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
