"""Single requests beside the common path: chat messages, and requests that LMDeploy refuses without harm.

LMDeploy refuses most bad requests in ``lmdeploy/serve/core/async_engine.py`` (``preprocess``), before any
device is involved; an empty prompt, which it lets through, dlinfer refuses. The engine has to answer the next
request as if nothing had been.
"""

from typing import Any

import pytest

from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

SESSION_LEN = 256
GREEDY = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
CHAT = "please introduce yourself"
RENDERED = f"<|im_start|>user\n{CHAT}<|im_end|>\n<|im_start|>assistant\n"

# Request -> what the refusal must name.
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "empty prompt": ("", GREEDY, "empty"),
    "no new tokens": ("hello", {"max_new_tokens": 0}, "max_new_tokens"),
    "longer than the session": ("hello " * SESSION_LEN, GREEDY, "context length"),
    "unknown response format": ("hello", {"response_format": {"type": "haiku"}}, "haiku"),
    "malformed schema": (
        "hello",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "potato"}},
            }
        },
        "",
    ),
}


@pytest.fixture(scope="module")
def run(lab: Lab) -> EngineRun:
    model = lab.model("qwen2")
    good = {"prompts": lab.prompts(model), "gen": GREEDY}
    steps: list[dict[str, Any]] = [
        {
            "name": "chat",
            "kind": "call",
            "chat": True,
            "prompts": [[{"role": "user", "content": CHAT}]],
            "gen": GREEDY,
        },
        {"name": "empty batch", "kind": "call", "prompts": [], "gen": GREEDY},
        {
            "name": "to the session's end",
            "kind": "call",
            "prompts": ["hello"],
            "gen": {**GREEDY, "max_new_tokens": 999},
        },
    ]
    for name, (prompt, gen, _) in BAD.items():
        steps += [
            {"name": name, "kind": "call", "prompts": [prompt], "gen": gen},
            {"name": f"after {name}", "kind": "call", **good},
        ]
    # Bad and good ones in one batch: the good ones must not notice.
    mixed = [(prompt, gen) for prompt, gen, _ in BAD.values()] + [
        (prompt, GREEDY) for prompt in good["prompts"]
    ]
    steps.append(
        {"name": "mixed", "kind": "call", "prompts": [p for p, _ in mixed], "gen": [g for _, g in mixed]}
    )
    return lab.engine(model, steps, session_len=SESSION_LEN, eager_mode=True)


@pytest.fixture(scope="module")
def expected(lab: Lab) -> list[list[int]]:
    model = lab.model("qwen2")
    hf = lab.reference(model, prompts=lab.prompts(model), max_new_tokens=NEW_TOKENS)
    return [hf[f"tokens_{i}"].tolist() for i in range(4)]


def test_chat_template(lab: Lab, run: EngineRun) -> None:
    hf = lab.reference(lab.model("qwen2"), prompts=[RENDERED], max_new_tokens=NEW_TOKENS)
    assert run.tokens("chat") == [hf["tokens_0"].tolist()]
    assert run["chat"][0]["input_token_len"] == len(hf["prompt_0"])


def test_empty_batch(run: EngineRun) -> None:
    assert run["empty batch"] == []


def test_generation_ends_with_the_session(run: EngineRun) -> None:
    """``Engine._on_add_message`` cuts max_new_tokens to what the session still holds."""
    (response,) = run["to the session's end"]
    assert response["finish_reason"] == "length"
    assert response["input_token_len"] + len(response["token_ids"]) == SESSION_LEN


@pytest.mark.parametrize("name", BAD)
def test_refusal_names_the_cause_and_harms_nobody(
    run: EngineRun, expected: list[list[int]], name: str
) -> None:
    (response,) = run[name]
    assert response["finish_reason"] == "error"
    assert response["token_ids"] == []
    assert BAD[name][2] in response["error_message"]
    assert run.tokens(f"after {name}") == expected


def test_good_requests_beside_bad_ones(run: EngineRun, expected: list[list[int]]) -> None:
    reasons = [response["finish_reason"] for response in run["mixed"]]
    assert reasons == ["error"] * len(BAD) + ["length"] * 4
    assert run.tokens("mixed")[len(BAD) :] == expected
