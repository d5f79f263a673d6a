"""Whose turn it is, how many tokens of prompts a step reads, and that no token depends on it."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmdeploy")

from lmdeploy.pytorch.engine.inputs_maker import InputsMakerAsync
from lmdeploy.pytorch.messages import MessageStatus

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.stepping import prompt_pace, prompt_turns
from examples.tiny_models.build import build

BLOCK = 64
MOST = 1024
BESIDE = 256


def decoding(new: int = 1, most: int = 100, status: MessageStatus = MessageStatus.RUNNING) -> Any:
    """A sequence that decodes: of ``new`` tokens, ``most`` at the end."""
    limit = SimpleNamespace(max_new_tokens=most)
    return SimpleNamespace(status=status, num_new_tokens=new, sampling_param=limit)


class Maker:
    """What the patches see of LMDeploy's inputs maker."""

    def __init__(self, *, running: int, last: str, waiting: bool = True, chunk: Any = None) -> None:
        self.running_seqs = [decoding() for _ in range(running)]
        self._last_forward_kind = last
        self.config = SimpleNamespace(max_prefill_token_num=MOST, max_batches=4)
        self.scheduler = SimpleNamespace(
            has_waiting=lambda: waiting,
            has_kv_connector=lambda: False,
            cache_config=SimpleNamespace(block_size=BLOCK, max_prefill_token_num=MOST),
        )
        self.long_context_chunker = SimpleNamespace(
            enabled=lambda: chunk is not None, max_prefill_token_num=MOST, max_prefill_num=MOST, seq=chunk
        )
        self.executor = SimpleNamespace(model_agent=object())
        self.engine_strategy = SimpleNamespace()

    def make(self, prefill: bool, ahead: bool = False, **payload: Any) -> dict[str, Any] | None:
        """Inputs as the patched method makes them, where the original gives ``payload``.

        ahead: whether the step before is still computed.
        """
        return prompt_turns._make_forward_inputs.build(lambda *_: payload or None)(self, prefill, ahead)


class Pace:
    """A pace at which a step reads BESIDE tokens beside decoding, and MOST without."""

    beside = BESIDE

    @classmethod
    def tokens(cls, seconds: float, *, decodes: bool) -> int:
        assert seconds == (0.25 if decodes else 2.0)
        return cls.beside if decodes else MOST


do_prefill = prompt_turns._do_prefill.build(lambda maker: True)
DECODES = {"inputs": None, "delta": object()}


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(seconds_beside_decoding=0.25, seconds_of_prompts=2.0)
    monkeypatch.setattr(prompt_pace, "of", lambda agent: Pace)
    monkeypatch.setattr(activation, "_active", "cpu")
    monkeypatch.setattr(activation, "device", lambda: device)
    monkeypatch.setattr(activation, "is_synchronous", lambda: True)
    monkeypatch.setattr(prompt_turns, "_is_one_process", lambda executor: True)


@pytest.mark.usefixtures("on_host")
class TestTurns:
    @pytest.mark.parametrize("last", ["prefill", "long_context_chunk", "last_long_context_chunk"])
    def test_after_prompts_decoding_has_its_turn(self, last):
        assert not do_prefill(Maker(running=2, last=last))

    def test_after_decoding_prompts_have_theirs(self):
        assert do_prefill(Maker(running=2, last="decode"))

    def test_a_full_batch_decodes(self):
        assert not do_prefill(Maker(running=4, last="decode"))

    def test_a_prompt_that_is_read_already_goes_on_in_a_full_batch(self):
        assert do_prefill(Maker(running=4, last="decode", waiting=False, chunk=sequence(900)))

    def test_where_nobody_decodes_it_is_lmdeploys_choice(self):
        assert do_prefill(Maker(running=0, last="prefill"))

    def test_other_devices_keep_the_order_of_lmdeploy(self, monkeypatch):
        monkeypatch.setattr(activation, "_active", None)
        assert do_prefill(Maker(running=2, last="prefill"))


@pytest.mark.usefixtures("on_host")
class TestLimits:
    def test_a_step_beside_decoding_reads_what_its_time_allows(self):
        maker = Maker(running=3, last="decode")
        maker.make(prefill=True)
        assert maker.scheduler.cache_config.max_prefill_token_num == BESIDE
        assert maker.long_context_chunker.max_prefill_token_num == BESIDE

    def test_ranks_are_not_timed(self, monkeypatch):
        monkeypatch.setattr(prompt_turns, "_is_one_process", lambda executor: False)
        monkeypatch.setattr(prompt_pace, "of", None)
        maker = Maker(running=3, last="decode")
        maker.make(prefill=True)
        assert maker.long_context_chunker.max_prefill_token_num == prompt_turns.RANKS_BESIDE
        maker.running_seqs = []
        maker.make(prefill=True)
        assert maker.long_context_chunker.max_prefill_token_num == MOST

    def test_a_block_is_read_however_little_time_is_left(self, monkeypatch):
        monkeypatch.setattr(Pace, "beside", 8)
        maker = Maker(running=1, last="decode")
        maker.make(prefill=True)
        assert maker.long_context_chunker.max_prefill_token_num == BLOCK

    def test_a_step_reads_whole_blocks_of_diffusion(self, monkeypatch):
        monkeypatch.setattr(Pace, "beside", 103)
        maker = Maker(running=1, last="decode")
        maker.engine_strategy.dllm_block_length = 8
        maker.make(prefill=True)
        assert maker.scheduler.cache_config.max_prefill_token_num == 96
        assert maker.long_context_chunker.max_prefill_token_num == 96

    def test_a_user_who_asked_for_less_keeps_it(self):
        maker = Maker(running=1, last="decode")
        maker.config.max_prefill_token_num = maker.long_context_chunker.max_prefill_token_num = 32
        maker.scheduler.cache_config.max_prefill_token_num = 32
        maker.make(prefill=True)
        assert maker.long_context_chunker.max_prefill_token_num == 32

    def test_the_limit_comes_back_when_nobody_decodes(self):
        maker = Maker(running=1, last="decode", chunk=sequence(2000))
        maker.make(prefill=True)
        assert maker.long_context_chunker.max_prefill_num == BESIDE
        maker.running_seqs = []
        maker.make(prefill=True)
        assert maker.long_context_chunker.max_prefill_num == MOST
        assert maker.scheduler.cache_config.max_prefill_token_num == MOST

    @pytest.mark.parametrize("rest", [BESIDE, 2 * BESIDE])
    def test_a_step_has_no_more_than_the_limit_however_little_is_left_of_a_prompt(self, rest):
        maker = Maker(running=1, last="decode", chunk=sequence(rest))
        maker.make(prefill=True)
        assert maker.long_context_chunker.max_prefill_num == BESIDE
        assert maker.long_context_chunker.max_prefill_token_num == BESIDE

    def test_lengths_that_must_be_computed_at_once_stay(self):
        maker = Maker(running=1, last="decode")
        setattr(maker, "dlinfer_rope_lengths", object())  # noqa: B010
        maker.make(prefill=True)
        assert maker.scheduler.cache_config.max_prefill_token_num == MOST


@pytest.mark.usefixtures("on_host")
class TestFollowed:
    def test_decoding_in_its_turn_is_followed_by_prompts(self):
        made = Maker(running=2, last="prefill").make(prefill=False, **DECODES)
        assert made is not None and made[prompt_turns.FOLLOWED]

    @pytest.mark.parametrize(
        "maker, prefill, payload",
        [
            (Maker(running=2, last="prefill", waiting=False), False, DECODES),
            (Maker(running=2, last="decode"), True, DECODES),  # no prompt could be admitted
            (Maker(running=2, last="decode"), True, {"inputs": object(), "delta": None}),
        ],
        ids=["nobody waits", "nobody is admitted", "prompts"],
    )
    def test_others_are_not(self, maker, prefill, payload):
        made = maker.make(prefill, **payload)
        assert made is not None and not made[prompt_turns.FOLLOWED]

    def test_nothing_to_do(self):
        assert Maker(running=0, last="decode").make(prefill=True) is None


@pytest.mark.usefixtures("on_host")
class TestLastTokens:
    """A step is not made for sequences that end, by their length, with the one that is computed."""

    def maker(self, *running: Any, **given: Any) -> Maker:
        """Whose last step was of these sequences, and is still computed."""
        maker = Maker(running=0, **({"last": "decode", "waiting": False} | given))
        maker.running_seqs = list(running)
        maker.make(False, running=maker.running_seqs, **DECODES)
        return maker

    def test_nothing_is_made_where_all_end(self):
        maker = self.maker(decoding(99), decoding(1, most=2))
        assert maker.make(prefill=False, ahead=True, **DECODES) is None

    @pytest.mark.parametrize("others", [decoding(98), decoding(0, most=2)])
    def test_all_decode_where_one_goes_on(self, others):
        maker = self.maker(decoding(99), others)
        assert maker.make(prefill=False, ahead=True, **DECODES) is not None

    def test_what_is_not_computed_yet_is_a_token_short(self):
        maker = self.maker(decoding(99))
        assert maker.make(prefill=False, **DECODES) is not None
        prompts = self.maker(decoding(99))
        prompts.make(True, ahead=True, running=[decoding(0)], inputs=object(), delta=None)
        assert (
            prompts.make(prefill=False, ahead=True, **DECODES) is not None
        )  # the prompts' step adds none to it

    def test_one_that_did_not_end_is_decoded(self):
        """However long it is: what was made ready is nothing, and then nothing is in flight."""
        maker = self.maker(decoding(99))
        assert maker.make(prefill=False, ahead=True, **DECODES) is None
        maker.running_seqs[0].num_new_tokens += 1
        assert maker.make(prefill=False, **DECODES) is not None

    def test_a_prompt_of_one_token_is_not_decoded(self):
        one = decoding(0, most=1)
        maker = Maker(running=0, last="prefill", waiting=False)
        maker.make(True, running=[one], inputs=object(), delta=None)
        maker.running_seqs = [one]
        assert maker.make(prefill=False, ahead=True, **DECODES) is None

    def test_the_next_prompt_is_read_at_once(self):
        maker = self.maker(decoding(99), waiting=True)
        maker.make(prefill=True, ahead=True)
        assert maker.scheduler.cache_config.max_prefill_token_num == MOST
        ended = self.maker(decoding(7, status=MessageStatus.STOPPED), waiting=True)
        ended.make(prefill=True)
        assert ended.scheduler.cache_config.max_prefill_token_num == MOST

    def test_no_prompts_follow_a_step_that_is_the_last(self):
        maker = self.maker(decoding(98), waiting=True)
        maker.running_seqs[0].num_new_tokens += 1
        made = maker.make(False, running=maker.running_seqs, **DECODES)
        assert made is not None and not made[prompt_turns.FOLLOWED]

    def test_a_prompt_that_is_read_already_goes_on(self):
        maker = self.maker(decoding(99), chunk=sequence(900))
        assert maker.make(prefill=False, ahead=True, **DECODES) is not None


def sequence(tokens: int) -> Any:
    """A prompt without pictures."""
    return SimpleNamespace(num_token_ids=tokens, get_chunk_limit_multimodals=dict)


def test_lmdeploys_maker_has_what_is_read():
    for name in ("do_prefill_default", "_make_forward_inputs"):
        assert hasattr(InputsMakerAsync, name)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family, mode",
    [
        ("llama", "graph"),
        pytest.param("llama", "eager", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "graph", marks=pytest.mark.full),
        ("qwen3_moe", "eager"),
    ],
)
def test_tokens_are_those_of_each_request_alone(family, mode, tmp_path):
    """In float32, 24 requests in a batch of 8, with and without prefix caching; most steps are joined."""
    build(family, tmp_path / family, seed=0, dtype="float32")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.framework.lmdeploy_ext.stepping.turns_job",
            str(tmp_path / family),
            mode,
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for caching in ("plain", "prefix caching"):
        assert told[caching]["together"] == told[caching]["alone"]
        assert told[caching]["joined"] > 20
        assert told[caching]["most tokens"] <= told["limit"]
        assert told[caching]["eager phases"] == []
        if mode == "graph":
            assert told[caching]["one row each"] == told[caching]["joined"]
