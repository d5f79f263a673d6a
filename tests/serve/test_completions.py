"""``/v1/completions``: choices, prompts, log-probabilities and echo, as OpenAI's client reads them."""

from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.harness import Lab
from tests.serve.api_server import MODEL_NAME, ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPTS = ["hello world", "the quick brown fox jumps", "what is the capital"]
GREEDY: dict[str, Any] = {
    "model": MODEL_NAME,
    "max_tokens": 8,
    "temperature": 0.0,
    "extra_body": {"ignore_eos": True},
}


def complete(server: ApiServer, **options: Any) -> Any:
    with server.client() as client:
        return client.completions.create(**GREEDY | options)


def texts(server: ApiServer, **options: Any) -> list[str]:
    answer = complete(server, **options)
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [choice.text for choice in answer.choices]


def streamed(server: ApiServer, **options: Any) -> list[str]:
    joined: dict[int, str] = {}
    with server.client() as client:
        given: Any = GREEDY | options | {"stream": True}
        for event in client.completions.create(**given):
            for choice in event.choices:
                joined[choice.index] = joined.get(choice.index, "") + choice.text
    return [joined[index] for index in sorted(joined)]


def test_each_prompt_has_its_index(server: ApiServer):
    """LMDeploy 0.18 itself streams them one after another, all as choice 0."""
    alone = [texts(server, prompt=prompt)[0] for prompt in PROMPTS]
    assert texts(server, prompt=PROMPTS) == alone
    assert streamed(server, prompt=PROMPTS) == alone


def test_choices_of_a_prompt_follow_each_other_and_count_seeds_up(server: ApiServer):
    drawn = {"temperature": 1.0, "seed": 5, "prompt": PROMPTS[:2]}
    both = texts(server, n=2, **drawn)
    assert len(set(both)) == 4
    assert streamed(server, n=2, **drawn) == both
    assert texts(server, **drawn) == both[::2]
    assert texts(server, **drawn | {"seed": 6}) == both[1::2]


def test_usage_counts_a_prompt_once(server: ApiServer):
    one = complete(server, prompt=PROMPTS[1]).usage
    both = complete(server, prompt=PROMPTS[1], n=2).usage
    assert (both.prompt_tokens, both.completion_tokens) == (one.prompt_tokens, 2 * one.completion_tokens)


def test_prompts_of_token_ids(lab: Lab, model: Any, server: ApiServer):
    ids = [lab.tokenizer(model).encode(prompt).ids for prompt in PROMPTS]
    assert texts(server, prompt=ids) == texts(server, prompt=PROMPTS)
    assert texts(server, prompt=ids[0]) == texts(server, prompt=PROMPTS[0])


def test_logprobs_of_an_echo_are_those_of_transformers(lab: Lab, model: Any, server: ApiServer):
    """Prompt and continuation in one list; the first token has none."""
    (choice,) = complete(server, prompt=PROMPTS[1], echo=True, logprobs=3).choices
    tokenizer = lab.tokenizer(model)
    prompt = tokenizer.encode(PROMPTS[1]).ids
    hf = lab.reference(model, prompts=[PROMPTS[1]], max_new_tokens=GREEDY["max_tokens"])
    ids = [*prompt, *hf["tokens_0"].tolist()]
    logits = lab.reference(model, score=[ids])["logits_0"].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    said = choice.logprobs
    assert choice.text.startswith(PROMPTS[1])
    assert choice.text[len(PROMPTS[1]) :] == texts(server, prompt=PROMPTS[1])[0]
    assert len(said.tokens) == len(said.token_logprobs) == len(said.top_logprobs) == len(ids)
    assert said.token_logprobs[0] is None
    own = expected[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(said.token_logprobs[1:], own, atol=1e-3)
    for token, value, top in zip(
        said.tokens[1:], said.token_logprobs[1:], said.top_logprobs[1:], strict=True
    ):
        assert 3 <= len(top) <= 4
        assert top[token] == value
        assert value <= max(top.values())
    generated = said.token_logprobs[len(prompt) :]
    assert generated == [max(top.values()) for top in said.top_logprobs[len(prompt) :]]  # greedy
    scored = complete(server, prompt=ids, echo=True, logprobs=1, max_tokens=0).choices[0].logprobs
    np.testing.assert_allclose(scored.token_logprobs[1:], said.token_logprobs[1:], atol=1e-4)
    assert said.text_offset == sorted(said.text_offset)
    for offset, token in zip(said.text_offset, said.tokens, strict=True):
        if "\\" not in token:
            assert choice.text[offset : offset + len(token)] == token


def test_echo_alone(server: ApiServer):
    answer = complete(server, prompt=PROMPTS[0], echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.usage.completion_tokens) == (PROMPTS[0], 0)
    assert streamed(server, prompt=PROMPTS[0], echo=True) == texts(server, prompt=PROMPTS[0], echo=True)


def test_a_stop_is_not_looked_for_in_the_echo(server: ApiServer):
    (text,) = texts(server, prompt=PROMPTS[0], echo=True, stop=["hello"])
    assert text.startswith(PROMPTS[0])
    assert len(text) > len(PROMPTS[0])


def test_fields_of_the_other_endpoints(lab: Lab, model: Any, server: ApiServer):
    """LMDeploy's protocol declares them elsewhere, and drops them here."""
    free = complete(server, prompt=PROMPTS[0], logprobs=1, max_tokens=8).choices[0]
    fourth = next(i for i in range(1000) if lab.tokenizer(model).decode([i]) == free.logprobs.tokens[4])
    for least, expected in ((0, free.logprobs.text_offset[4]), (8, None)):
        more = {"stop_token_ids": [fourth], "min_new_tokens": least}
        (text,) = texts(server, prompt=PROMPTS[0], extra_body=more)
        assert (text == free.text[:expected].rstrip("\ufffd")) is (least == 0)
    body = {"extra_body": {"stop_token_ids": ["x"]}}
    with pytest.raises(openai.BadRequestError, match="stop_token_ids"):
        complete(server, prompt=PROMPTS[0], **body)


def test_token_ids_on_demand(lab: Lab, model: Any, server: ApiServer):
    """As in chats: those of the answer, without the prompt's."""
    asked: dict[str, Any] = {"prompt": PROMPTS[:2], "echo": True, "logprobs": 1}
    asked["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
    choices = complete(server, **asked).choices
    for prompt, choice in zip(PROMPTS, choices, strict=False):
        assert len(choice.output_ids) == GREEDY["max_tokens"]
        text = prompt + lab.tokenizer(model).decode(choice.output_ids)
        assert choice.text.rstrip("\ufffd") == text.rstrip("\ufffd")
    streams: dict[int, list[int]] = {0: [], 1: []}
    with server.client() as client:
        given: Any = GREEDY | asked | {"stream": True}
        for event in client.completions.create(**given):
            for choice in event.choices:
                streams[choice.index] += choice.output_ids
    assert list(streams.values()) == [choice.output_ids for choice in choices]
    assert "output_ids" not in complete(server, prompt=PROMPTS[0]).choices[0].model_dump()


@pytest.mark.parametrize("token", [-1, 10**6])
def test_an_echo_of_ids_outside_the_vocabulary(token: int, server: ApiServer):
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        complete(server, prompt=[5, token], echo=True, max_tokens=0)
