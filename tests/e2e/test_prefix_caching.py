"""End-to-end: cached prefixes are found again, also by many more conversations than run at once, and in windows."""

import pytest

from tests.e2e.harness import Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

TURNS = 10
GEN = {"max_new_tokens": 12, "ignore_eos": True}
OPTIONS = {
    "dtype": "float32",
    "eager_mode": True,
    "block_size": 16,
    "max_batch_size": 1,
    "session_len": 512,
}


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_every_conversation_finds_its_own_prefix(lab: Lab, family):
    model = lab.model(family)
    conversations = lab.prompts(model, (80,) * TURNS)
    second = [f"{text} and what now" for text in conversations]
    steps = [
        {"name": "first", "kind": "one_by_one", "prompts": conversations, "gen": GEN},
        {"name": "second", "kind": "one_by_one", "prompts": second, "gen": GEN},
    ]
    caching = OPTIONS | {"enable_prefix_caching": True}
    cached, plain = lab.engines([(model, steps, caching), (model, steps, OPTIONS)])
    assert cached.tokens("first") == plain.tokens("first")
    assert cached.tokens("second") == plain.tokens("second")
    assert [answer["cached_tokens"] for answer in cached["second"]] == [80] * TURNS
    assert [answer["cached_tokens"] for answer in plain["second"]] == [0] * TURNS
