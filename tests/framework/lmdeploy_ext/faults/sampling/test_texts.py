"""A text counts its tokens, and is the one of the sequence that a row belongs to."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dlinfer.framework.lmdeploy_ext.faults.sampling.texts import (
    START,
    Rules,
    Start,
    Text,
    Texts,
    of_rows,
)

PENALTY = Rules(repetition=1.2, frequency=0.5)


def text(rules: Rules, generated: list[int], prompt: tuple[int, ...] = ()) -> Text:
    return Text(Start(rules, np.array(prompt, np.int64), np.array(generated, np.int64), len(prompt)))


def counted(pair: tuple[np.ndarray, np.ndarray]) -> dict[int, int]:
    return dict(zip(pair[0].tolist(), pair[1].tolist(), strict=True))


def test_counts_of_many_tokens():
    rng = np.random.default_rng(0)
    prompt, generated = rng.integers(0, 900, 300), rng.integers(0, 900, 2000).tolist()
    one = text(PENALTY, generated[:7], tuple(prompt))
    for at in range(7, 2000, 3):
        one.add(generated[at : at + 3])
    assert counted(one.counts()) == {**dict.fromkeys(prompt.tolist(), 0), **Counter(generated)}
    assert one.length == 2000


def test_drafted_tokens_count_for_one_answer():
    one = text(PENALTY, [5, 5, 7], (9,))
    assert counted(one.counts([5, 8, 8, 9])) == {9: 1, 5: 3, 7: 1, 8: 2}
    assert counted(one.counts([5])) == {9: 0, 5: 3, 7: 1}
    assert counted(one.counts()) == {9: 0, 5: 2, 7: 1}
    assert all(array.dtype == np.int64 for array in one.counts([5]))


@pytest.mark.parametrize(
    ("generated", "size", "count", "expected"),
    [
        ([], 1, 1, False),
        ([], 2, 2, False),
        ([3, 4, 3, 4], 2, 2, True),
        ([3, 4, 3, 4], 2, 3, False),
        ([3, 4, 3, 4, 5], 2, 2, False),
        ([3, 3, 3], 2, 2, True),
        ([3], 1, 1, True),
        ([0, 0], 3, 1, False),
        ([3, 4, 3, 4], 0, 2, False),
        ([3, 4, 3, 4], 2, 0, False),
    ],
)
def test_repetitions(generated: list[int], size: int, count: int, expected: bool):
    rules = Rules(ngram_size=size, ngram_count=count)
    assert text(rules, generated).repeats(64) is expected
    if generated:
        assert text(rules, generated[:-1]).repeats(64, generated[-1:]) is expected


def test_repetitions_outside_the_window_do_not_count():
    one = text(Rules(ngram_size=1, ngram_count=2), [1, 2, 3, 1])
    assert one.repeats(4)
    assert not one.repeats(3)


def inputs(rows: list[tuple[int, Start | None]]) -> Any:
    """SamplingInputs of sequences: (session, what starts with the step)."""
    contexts = [{"session_id": s, "seq_id": 0} | ({START: start} if start else {}) for s, start in rows]
    return SimpleNamespace(session_ctx=contexts)


def start(*generated: int, rules: Rules = PENALTY) -> Start:
    return Start(rules, np.empty(0, np.int64), np.array(generated, np.int64), 0)


def lengths(step: Any) -> dict[int, int]:
    return {row: one.length for row, one, _ in of_rows(step.session_ctx)}


def test_rows_keep_their_texts_in_whatever_order_they_come():
    texts = Texts()
    step = inputs([(1, start()), (2, None), (3, start(7, 8))])
    texts.begin(step)
    texts.add(step, torch.tensor([10, 20, 30]))
    step = inputs([(3, None), (1, None)])
    texts.begin(step)
    assert lengths(step) == {0: 3, 1: 1}


def test_a_preempted_text_starts_anew_without_the_dropped_token():
    texts = Texts()
    texts.begin(inputs([(1, start())]))
    texts.add(step := inputs([(1, None)]), torch.tensor([4]))
    texts.begin(step)
    texts.add(step, torch.tensor([5]))  # is dropped
    step = inputs([(1, start(4))])
    texts.begin(step)
    assert lengths(step) == {0: 1}


def test_ended_sessions_are_forgotten():
    texts = Texts()
    texts.begin(inputs([(1, start()), (2, start())]))
    texts.forget([1])
    step = inputs([(1, None), (2, None)])
    texts.begin(step)
    assert list(lengths(step)) == [1]
    texts.clear()
    step = inputs([(2, None)])
    texts.begin(step)
    assert lengths(step) == {}


def test_rows_without_rules_have_no_text():
    texts = Texts()
    step = inputs([(1, start(rules=Rules()))])
    assert [row for row, _ in texts.begin(step)] == [0]
    assert lengths(step) == {}


@pytest.mark.parametrize("chunk", [1, 7, 300])
def test_logits_processors_read_prompt_and_answer(chunk: int):
    rng = np.random.default_rng(1)
    prompt, generated = rng.integers(0, 900, 300).tolist(), rng.integers(0, 900, 1000).tolist()
    one = text(Rules(has_processors=True), generated[:chunk], tuple(prompt))
    for at in range(chunk, 1000, chunk):
        one.add(generated[at : at + chunk])
    assert one.all_tokens().tolist() == prompt + generated
    assert one.all_tokens([3, 4]).tolist() == [*prompt, *generated, 3, 4]
    assert one.all_tokens().tolist() == prompt + generated


def test_each_place_of_a_draft_reads_those_before_it():
    texts = Texts()
    step = inputs([(1, start()), (2, start())])
    texts.begin(step, drafted=[[4, 5], [6, 7]])
    expanded = [context for context in step.session_ctx for _ in range(3)]
    assert [list(drafted) for _, _, drafted in of_rows(expanded)] == [[], [4], [4, 5], [], [6], [6, 7]]
    texts.add(step, torch.tensor([[4, 9, -1], [6, 7, 8]]))
    assert lengths(step) == {0: 2, 1: 3}
