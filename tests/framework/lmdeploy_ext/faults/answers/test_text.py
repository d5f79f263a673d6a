"""LMDeploy's own ``AsyncEngine.generate`` over an engine that hands out given tokens in given pieces."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from lmdeploy import GenerationConfig, PytorchEngineConfig
from lmdeploy.messages import EngineOutput, ResponseType
from lmdeploy.metrics.metrics_processor import metrics_processor
from lmdeploy.serve.core.async_engine import AsyncEngine, PreprocessedRequest
from lmdeploy.serve.managers import SessionManager
from lmdeploy.tokenizer import Tokenizer

from dlinfer.errors import GenerationOptionError
from tests.e2e.harness import Lab

PROMPT = [5, 6, 7]


class Engine:
    """Hands out tokens; stands for LMDeploy's engine and for its instance."""

    def __init__(self, pieces: list[list[int]], finish: bool = True) -> None:
        self.pieces = pieces
        self.finish = finish
        self.cancelled = False
        self.taken = 0

    def create_instance(self) -> "Engine":
        return self

    async def async_stream_infer(self, session_id: int, **_: Any) -> AsyncIterator[EngineOutput]:
        for number, piece in enumerate(self.pieces, 1):
            if self.cancelled:
                yield EngineOutput(ResponseType.CANCEL, [])
                return
            self.taken = number
            last = self.finish and number == len(self.pieces)
            rows = [{token: -1.0, token + 1: -0.5} for token in piece]
            yield EngineOutput(
                ResponseType.FINISH if last else ResponseType.SUCCESS, list(piece), logprobs=rows
            )
            await asyncio.sleep(0)

    async def async_cancel(self, session_id: int) -> None:
        self.cancelled = True


@pytest.fixture(scope="module")
def tokenizer(lab: Lab) -> Tokenizer:
    return Tokenizer(str(lab.model("llama")))


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    PytorchEngineConfig(device_type="cpu")


def async_engine(engine: Engine, tokenizer: Tokenizer) -> Any:
    made: Any = object.__new__(AsyncEngine)
    made.tokenizer, made.engine, made.num_spec_token, made.epoch = tokenizer, engine, 0, 0
    made.request_logger = SimpleNamespace(log_response=lambda *_: None)
    made.session_mgr = SessionManager()
    made.session_mgr.build_request_handle_pool(engine, 1)
    return made


def generate(engine: Engine, tokenizer: Tokenizer, **options: Any) -> list[Any]:
    """All answers to one request."""
    given: dict[str, Any] = {"logprobs": 1} | options
    config = GenerationConfig(**given)
    config.convert_stop_bad_words_to_ids(tokenizer)
    config.stop_token_ids = sorted({tokenizer.eos_token_id, *(config.stop_token_ids or ())})

    async def run() -> list[Any]:
        made = async_engine(engine, tokenizer)
        request = PreprocessedRequest(
            made.session_mgr.get(), {"input_ids": PROMPT}, len(PROMPT), config, None
        )
        answers = [answer async for answer in made.generate(request)]
        assert not made.session_mgr.sessions
        assert made.session_mgr.request_handle_pool.num_dispatched == 0
        return answers

    return asyncio.run(run())


def joined(answers: list[Any]) -> tuple[str, list[int], list[Any], str]:
    ids = [token for answer in answers for token in answer.token_ids]
    rows = [row for answer in answers for row in answer.logprobs or []]
    assert answers[-1].generate_token_len == len(ids)
    return "".join(answer.response for answer in answers), ids, rows, answers[-1].finish_reason


def cut(tokens: list[int], rng: random.Random) -> list[list[int]]:
    at = sorted({0, len(tokens), *rng.choices(range(len(tokens) + 1), k=rng.randint(0, len(tokens)))})
    return [tokens[begin:end] for begin, end in itertools.pairwise(at)]


def smile(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode("smile 😀 and smile", add_bos=False, add_special_tokens=False)
    assert tokenizer.decode(ids[:-3]).endswith("\ufffd") or len(ids) > 6
    return ids


@pytest.mark.parametrize("stop", [None, "and", "😀 a", "ile ", "zzz"])
def test_text_depends_on_the_tokens_alone(stop: str | None, tokenizer: Tokenizer):
    """LMDeploy 0.18 itself drops the text of a piece that ends inside a character."""
    tokens = smile(tokenizer)
    for length in range(1, len(tokens) + 1):
        part = tokens[:length]
        options = {"stop_words": [stop]} if stop else {}
        expected = joined(generate(Engine([[token] for token in part]), tokenizer, **options))
        for seed in range(12):
            pieces = cut(part, random.Random(seed))
            assert joined(generate(Engine(pieces), tokenizer, **options)) == expected, pieces
        text = tokenizer.decode(part).rstrip("\ufffd")
        said, ids, rows, reason = expected
        if stop is not None and stop in text:
            assert (said, reason) == (text[: text.index(stop)], "stop")
            assert text.startswith(tokenizer.decode(ids)[: len(said)])
        else:
            assert (said, ids, reason) == (text, part, "length")
        assert [next(iter(row)) for row in rows] == ids


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("least", [0, 4])
def test_a_stop_ends_the_request_and_frees_the_engine(include: bool, least: int, tokenizer: Tokenizer):
    tokens = tokenizer.encode("the fox and the fox and the fox", add_bos=False, add_special_tokens=False)
    engine = Engine([[token] for token in tokens * 20])
    before = dict(vars(metrics_processor.scheduler_stats))
    answers = generate(
        engine,
        tokenizer,
        stop_words=["fox a", "zz"],
        include_stop_str_in_output=include,
        min_new_tokens=least,
    )
    text, ids, _, reason = joined(answers)
    assert reason == "stop"
    assert text.rstrip(" ") == ("the fox and the " if least else "the ").rstrip() + " fox a" * include
    assert engine.cancelled
    assert engine.taken < len(tokens) + 2
    assert len(ids) >= least
    after = vars(metrics_processor.scheduler_stats)
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == {"num_total_reqs": 1, "num_succeeded_reqs": 1}


def test_the_end_of_a_text_may_be_the_beginning_of_a_stop(tokenizer: Tokenizer):
    tokens = tokenizer.encode("the quick brown", add_bos=False, add_special_tokens=False)
    answers = generate(Engine([[token] for token in tokens]), tokenizer, stop_words=["brown fox"])
    assert joined(answers)[:2] == ("the quick brown", tokens)
    assert joined(answers)[3] == "length"


@pytest.mark.parametrize("include", [True, False])
def test_stop_tokens_still_stop(include: bool, tokenizer: Tokenizer):
    """The end of the sequence, and a stop word that is a special token."""
    tokens = tokenizer.encode("the quick", add_bos=False, add_special_tokens=False)
    (special,) = tokenizer.encode("<|im_end|>", add_bos=False, add_special_tokens=False)
    for end, stops in ((tokenizer.eos_token_id, ["zzz"]), (special, ["<|im_end|>"])):
        engine = Engine([[*tokens, end]])
        answers = generate(engine, tokenizer, stop_words=stops, include_stop_str_in_output=include)
        text, ids, _, reason = joined(answers)
        assert (text.split("<")[0], ids[: len(tokens)], reason) == ("the quick", tokens, "stop")
        assert ids[len(tokens) :] == ([end] if include else [])


def test_a_reader_who_leaves_cancels(tokenizer: Tokenizer):
    engine = Engine([[9]] * 50)

    async def run() -> None:
        made = async_engine(engine, tokenizer)
        config = GenerationConfig(stop_words=["zzz"])
        request = PreprocessedRequest(
            made.session_mgr.get(), {"input_ids": PROMPT}, len(PROMPT), config, None
        )
        answers = made.generate(request)
        async for _ in answers:
            break
        await answers.aclose()
        assert not made.session_mgr.sessions

    asyncio.run(run())
    assert engine.cancelled
    assert engine.taken < 5


def test_logprobs_hold_the_chosen_token_among_the_likeliest(tokenizer: Tokenizer):
    for count, expected in ((0, []), (1, [10]), (2, [10, 9])):
        answers = generate(Engine([[9]]), tokenizer, logprobs=count)
        (row,) = joined(answers)[2]
        assert row[9] == -1.0
        assert [token for token, _ in row.top] == expected


@pytest.mark.parametrize("words", ["stop_words", "bad_words"])
def test_an_empty_word_is_refused(words: str, tokenizer: Tokenizer):
    given: dict[str, Any] = {words: ["a", ""]}
    with pytest.raises(GenerationOptionError, match=words):
        GenerationConfig(**given).convert_stop_bad_words_to_ids(tokenizer)
