"""Stop strings against a search in the whole text, over random tokens, texts and stops."""

import random

import pytest

from dlinfer.framework.lmdeploy_ext.faults.answers.stop_text import StopText

ALPHABET = "ab😀"


def expected(pieces: list[str], stops: list[str], include: bool, least: int) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop of an answer, by searching the text after each token."""
    text, floor = "", 0
    for number, piece in enumerate(pieces, 1):
        text += piece
        if number <= least:
            floor = len(text)
        found = [(text.find(stop, floor), -len(stop), stop) for stop in stops]
        found = [each for each in found if each[0] >= 0]
        if found:
            at, _, stop = min(found)
            cut = at + len(stop) * include
            return text[:cut], tokens_before(cut, pieces[:number]), stop
    return text, len(pieces), None


def tokens_before(cut: int, pieces: list[str]) -> int:
    """How many tokens begin before a cut; those without text begin where the text after them does."""
    begin, count, waiting = 0, 0, 0
    for piece in pieces:
        waiting += 1
        if piece:
            count += waiting if begin < cut else 0
            waiting = 0
        begin += len(piece)
    return count


@pytest.mark.parametrize("seed", range(400))
def test_the_answer_ends_before_the_first_stop(seed: int):
    rng = random.Random(seed)

    def word(low: int, high: int) -> str:
        return "".join(rng.choices(ALPHABET, k=rng.randint(low, high)))

    pieces = [word(0, 3) for _ in range(rng.randint(1, 30))]
    stops = [word(1, 6) for _ in range(rng.randint(1, 4))]
    include, least = rng.random() < 0.5, rng.choice([0, 0, 3, 10])
    text, count, stop = expected(pieces, stops, include, least)

    answer = StopText(stops, include, least)
    said, ids, rows, at = "", [], [], 0
    while at < len(pieces) and answer.stopped is None:
        released = answer.feed([at], [{at: -1.0}], pieces[at])
        at += 1
        said, ids, rows = said + released.text, ids + released.token_ids, rows + released.logprobs
        assert text.startswith(said)
    if answer.stopped is None:
        released = answer.finish()
        said, ids, rows = said + released.text, ids + released.token_ids, rows + released.logprobs
    assert (said, ids) == (text, list(range(count)))
    assert [list(row) for row in rows] == [[token] for token in ids]
    assert answer.token_count == count
    assert (answer.stopped and answer.stopped.sequence) == stop
    assert answer.stopped is None or answer.stopped == "stop"


def test_text_that_cannot_be_a_stop_is_not_held_back():
    answer = StopText(["\n\nUser:"])
    assert answer.feed([1], None, "hello\n").text == "hello"
    assert answer.feed([2], None, "\nUse").text == ""
    assert answer.feed([3], None, "less").text == "\n\nUseless"
    assert answer.finish().text == ""
