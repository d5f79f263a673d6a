"""Penalties against their definition in float64, what processors read, and the ends of texts that repeat themselves."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.sampling import penalties
from dlinfer.framework.lmdeploy_ext.faults.sampling.texts import START, Rules, Start, Text, Texts

VOCABULARY = 50
Row = tuple[int, Text, list[int]]


def row(number: int, rules: Rules, prompt: list[int], generated: list[int]) -> Row:
    return (
        number,
        Text(Start(rules, np.array(prompt, np.int64), np.array(generated, np.int64), len(prompt))),
        [],
    )


def expected(logits: torch.Tensor, rules: Rules, prompt: list[int], generated: list[int]) -> torch.Tensor:
    """By vLLM's and OpenAI's definitions, a token at a time."""
    scores = logits.double().clone()
    for token in {*prompt, *generated}:
        scores[token] = (
            scores[token] * rules.repetition if scores[token] < 0 else scores[token] / rules.repetition
        )
    for token in set(generated):
        scores[token] -= rules.frequency * generated.count(token) + rules.presence
    return scores


@pytest.mark.parametrize(
    "rules",
    [
        Rules(repetition=1.4),
        Rules(repetition=0.7),
        Rules(presence=0.9),
        Rules(presence=-1.5),
        Rules(frequency=0.3),
        Rules(repetition=1.2, presence=0.5, frequency=-0.8),
    ],
)
def test_as_defined_at_any_temperature(rules: Rules):
    prompt = [1, 2, 3] if rules.repetition != 1 else []
    generated, temperature = [3, 4, 4, 4, 49], torch.tensor([1.0, 0.5, 1.7])
    logits = torch.randn(3, VOCABULARY)
    rows = [row(1, rules, prompt, generated), row(2, rules, prompt, [])]
    got = penalties.apply(logits / temperature[:, None], rows, temperature)
    assert torch.equal(got[0], logits[0])
    for number, said in ((1, generated), (2, [])):
        want = expected(logits[number], rules, prompt, said) / temperature[number].double()
        torch.testing.assert_close(got[number].double(), want, rtol=1e-5, atol=1e-5)


def test_what_may_not_be_drawn_stays_so():
    scores = torch.full((1, VOCABULARY), -torch.inf)
    rules = Rules(repetition=1.4, presence=1.0, frequency=1.0)
    penalties.apply(scores, [row(0, rules, [1], [2, 2])], None)
    assert scores.isinf().all()


def test_places_of_images_are_no_tokens():
    """Prompts of images may have ids beyond the vocabulary."""
    scores = torch.randn(1, VOCABULARY)
    rules = Rules(repetition=2.0)
    got = penalties.apply(scores.clone(), [row(0, rules, [3, VOCABULARY, 10**6], [])], None)
    assert (got != scores).nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_that_repeats_itself_ends_if_it_can(dtype: torch.dtype):
    rules = Rules(ngram_size=2, ngram_count=2)
    again, other = [3, 4, 3, 4], [1, 2, 3, 4]
    rows = [row(number, rules, [], said) for number, said in enumerate((again, again, other, again, []))]
    inputs: Any = SimpleNamespace(
        stop_words=torch.tensor([[7, 8], [-1, -1], [7, -1], [7, 8], [7, -1]]),
        num_ignore_eos=torch.tensor([0, 0, 0, 1, 0]),
    )
    scores = torch.randn(5, 9).to(dtype)
    got = penalties.end_repeating(scores.clone(), rows, inputs, 64)
    assert got[0].isinf().tolist() == [True] * 7 + [False, True]
    assert got[0, 7] == 0
    assert torch.equal(got[1:], scores[1:]), "no stop word, no repetition, may not stop yet, an empty text"
    inputs.stop_words = None
    assert torch.equal(penalties.end_repeating(scores.clone(), rows, inputs, 64), scores)


def test_processors_read_each_rows_own_text(monkeypatch: pytest.MonkeyPatch):
    """LMDeploy pads texts of other lengths in the middle, and counts one token for a step of several."""
    monkeypatch.setattr(activation, "_active", "cpu")
    processors = [lambda tokens, logits: logits]
    rules = Rules(has_processors=True)
    contexts: list[dict[str, Any]] = [{"session_id": number, "seq_id": 0} for number in range(3)]
    for context, said in zip(contexts, ([9, 9, 9, 9], [1], [2]), strict=True):
        prompt = np.array(said, np.int64)
        start = Start(Rules() if said == [2] else rules, prompt, np.empty(0, np.int64), len(said))
        context[START] = start
    drafted = [[5, 6], [7, 8], [3, 3]]
    Texts().begin(SimpleNamespace(session_ctx=contexts), drafted)
    seen: dict[int, list[int]] = {}

    async def lmdeploys(self: Any, scores: torch.Tensor) -> Any:
        seen.update({row: tokens.tolist() for row, tokens in self.sampling_inputs.all_ids.items()})
        return scores, None

    inputs = SimpleNamespace(
        session_ctx=[context for context in contexts for _ in range(3)],
        logits_processors=[processors] * 6 + [None] * 3,
        all_ids=None,
        temperature=None,
        stop_words=None,
    )
    call = penalties._call.build(lmdeploys)
    asyncio.run(call(SimpleNamespace(sampling_inputs=inputs), torch.zeros(9, VOCABULARY)))  # type: ignore[arg-type]
    first = [9, 9, 9, 9]
    assert seen == {0: first, 1: [*first, 5], 2: [*first, 5, 6], 3: [1], 4: [1, 7], 5: [1, 7, 8]}
