"""``stop_words`` and ``bad_words`` of a pipeline, in one call and streamed, against the text without them."""

from typing import Any

import pytest

from tests.e2e.harness import EngineRun, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

PROMPT = "the quick brown fox jumps over the lazy dog"
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
SPANS = ((4, 5), (8, 17), (12, 30), (9, 11), (40, 52))


@pytest.fixture(scope="module")
def free(lab: Lab) -> str:
    model = lab.model("llama")
    hf = lab.reference(model, prompts=[PROMPT], max_new_tokens=GREEDY["max_new_tokens"])
    return lab.tokenizer(model).decode(hf["tokens_0"].tolist()).rstrip("\ufffd")


@pytest.fixture(scope="module")
def run(lab: Lab, free: str) -> EngineRun:
    words = [free[begin:end] for begin, end in SPANS]
    gens = [GREEDY | {"stop_words": ["no such", word]} for word in words]
    shown = [gen | {"include_stop_str_in_output": True} for gen in gens]
    bad = [GREEDY | {"bad_words": [word]} for word in words if "\ufffd" not in word]
    prompts = [PROMPT] * len(words)
    steps: list[dict[str, Any]] = [
        {"name": "free", "kind": "stream", "prompts": [PROMPT], "gen": GREEDY},
        {"name": "call", "kind": "call", "prompts": prompts, "gen": gens},
        {"name": "stream", "kind": "stream", "prompts": prompts, "gen": gens},
        {"name": "shown", "kind": "call", "prompts": prompts, "gen": shown},
        {"name": "bad", "kind": "call", "prompts": prompts[: len(bad)], "gen": bad},
        {"name": "again", "kind": "call", "prompts": [PROMPT], "gen": GREEDY},
    ]
    return lab.engine(lab.model("llama"), steps, eager_mode=True, num_gpu_blocks=17)


def test_the_text_ends_before_the_stop(run: EngineRun, free: str):
    """LMDeploy 0.18 itself runs on past a stop that is not exactly one token."""
    assert run["free"][0]["text"] == free
    for (begin, end), answer, shown in zip(SPANS, run["call"], run["shown"], strict=True):
        stop = free[begin:end]
        expected = free[: free.index(stop)]
        assert (answer["text"], answer["finish_reason"]) == (expected, "stop")
        assert (shown["text"], shown["finish_reason"]) == (expected + stop, "stop")
        assert answer["generate_token_len"] == len(answer["token_ids"]) < GREEDY["max_new_tokens"]


def test_streamed_as_in_one_call(run: EngineRun):
    for name in ("text", "token_ids", "finish_reason", "generate_token_len"):
        assert [answer[name] for answer in run["stream"]] == [answer[name] for answer in run["call"]]


def test_bad_words_of_several_tokens_are_not_written(run: EngineRun, free: str):
    words = [free[begin:end] for begin, end in SPANS if "\ufffd" not in free[begin:end]]
    assert words
    for word, answer in zip(words, run["bad"], strict=True):
        assert word not in answer["text"]
        assert len(answer["token_ids"]) == GREEDY["max_new_tokens"]
        begin = free.index(word)
        assert answer["text"][: max(begin - 8, 0)] == free[: max(begin - 8, 0)]


def test_the_engine_is_free_afterwards(run: EngineRun, free: str):
    """Sequences that stopped hold no blocks: there are hardly more than the five of a step need."""
    assert run["again"][0]["text"] == free
