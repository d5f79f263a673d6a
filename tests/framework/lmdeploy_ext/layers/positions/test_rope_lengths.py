"""The length that governs a token is that of its own text, in batches, chunks and after preemption."""

from types import SimpleNamespace

import pytest
import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths
from dlinfer.framework.lmdeploy_ext.layers.positions.rope_lengths import RopeLengths

DYNAMIC = SimpleNamespace(rope_parameters={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
PHI3 = SimpleNamespace(
    rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 64}, model_type="phi3"
)
LLAMA = SimpleNamespace(rope_parameters={"rope_type": "default"}, model_type="llama")


def sequence(history: int, every: int, prompt: int) -> SimpleNamespace:
    """history: tokens in the cache; every: all tokens known; prompt: how many of them were asked with."""
    return SimpleNamespace(num_history_ids=history, num_all_ids=every, input_end_pos=prompt)


def inputs(*new: int) -> SimpleNamespace:
    return SimpleNamespace(seq_length=torch.tensor(new), target_position_ids=None)


def test_of_which_models():
    assert rope_lengths.of_model(DYNAMIC) == RopeLengths(64, computed_anew=False)
    assert rope_lengths.of_model(PHI3) == RopeLengths(64, computed_anew=True)
    assert rope_lengths.of_model(LLAMA) is None


def test_a_field_of_the_configuration_has_priority_over_one_of_the_rope_parameters():
    config = SimpleNamespace(**{**vars(PHI3), "original_max_position_embeddings": 32})
    assert rope_lengths.of_model(config) == RopeLengths(32, computed_anew=True)


def test_a_batch_of_prompts():
    given = inputs(3, 5)
    RopeLengths(64, computed_anew=False).govern(given, [sequence(0, 3, 3), sequence(0, 5, 5)])
    assert given.target_position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [3, 3, 3, 5, 5, 5, 5, 5]]


def test_a_chunk_has_the_length_of_the_whole_prompt():
    given = inputs(4)
    RopeLengths(64, computed_anew=False).govern(given, [sequence(4, 100, 100)])
    assert given.target_position_ids.tolist() == [[4, 5, 6, 7], [100] * 4]


def test_what_was_generated_before_a_preemption_keeps_its_lengths():
    given = inputs(6)
    RopeLengths(64, computed_anew=False).govern(given, [sequence(0, 6, 4)])
    assert given.target_position_ids.tolist() == [[0, 1, 2, 3, 4, 5], [4, 4, 4, 4, 5, 6]]
    RopeLengths(64, computed_anew=True).govern(given, [sequence(0, 6, 4)])
    assert given.target_position_ids.tolist() == [[0, 1, 2, 3, 4, 5], [6] * 6]


@pytest.mark.parametrize(
    ("positions", "q_seqlens", "lengths"),
    [([9, 63, 200], [1, 1, 1], [10, 64, 201]), ([0, 1, 2, 5, 6], [3, 2], [3, 3, 3, 7, 7])],
    ids=["decoding", "dummy prefill"],
)
def test_steps_that_come_without_lengths(positions, q_seqlens, lengths):
    context = SimpleNamespace(
        position_ids=torch.tensor([positions]),
        q_seqlens=torch.tensor(q_seqlens),
        model_config=SimpleNamespace(llm_config=DYNAMIC, hf_config=None),
    )
    assert rope_lengths.of_step(context).tolist() == [positions, lengths]
    context.model_config.llm_config = LLAMA
    assert rope_lengths.of_step(context) is context.position_ids


def prefilled(length: int, history: int, every: int) -> SimpleNamespace:
    """A sequence of Phi-3's whose last prefill was of so many tokens, and what is in its cache and known now."""
    given = sequence(0, length, length)
    RopeLengths(64, computed_anew=True).govern(inputs(length), [given])
    given.num_history_ids, given.num_all_ids = history, every
    return given


@pytest.mark.parametrize(
    ("sequence", "outgrown"),
    [
        (prefilled(60, 62, 63), False),
        (prefilled(60, 63, 64), True),  # planned a step ahead, so a token more is on its way
        (prefilled(60, 64, 65), True),  # not ahead: others were prefilled meanwhile
        (prefilled(64, 0, 64), True),
        (prefilled(65, 0, 65), False),
        (prefilled(65, 65, 66), False),
        (prefilled(600, 32, 600), False),
    ],
)
def test_a_cache_is_outgrown_by_the_first_token_beyond(sequence, outgrown):
    assert RopeLengths(64, computed_anew=True).outgrown_by(sequence) == outgrown
    assert not RopeLengths(64, computed_anew=False).outgrown_by(sequence)


@pytest.mark.parametrize(
    ("sequence", "invalid"),
    [
        (prefilled(60, 64, 65), True),
        (prefilled(60, 63, 64), False),
        (prefilled(65, 65, 66), False),
        (prefilled(600, 32, 600), False),
        (sequence(0, 600, 600), False),
    ],
)
def test_a_cache_of_shorter_days_is_dropped(sequence, invalid):
    assert RopeLengths(64, computed_anew=True).invalidates(sequence) == invalid


class Scheduler:
    """As much of LMDeploy's as the patches see."""

    def __init__(self, lengths: RopeLengths | None, waiting: list) -> None:
        self.waiting = waiting
        setattr(self, rope_lengths._ATTRIBUTE, lengths)


def test_a_cache_of_shorter_days_is_released_before_the_prefill():
    released = []
    stale, fresh = prefilled(60, 64, 65), sequence(0, 30, 30)
    stale.state = SimpleNamespace(release_paging_resources=lambda: released.append(stale))
    scheduler = Scheduler(RopeLengths(64, computed_anew=True), [stale, fresh])
    schedule = rope_lengths._schedule.build(lambda self, *rest: rest)
    assert schedule(scheduler, True, 1) == (True, 1)
    assert released == [stale]


def test_running_sequences_are_given_up_when_they_outgrow_their_cache():
    running = [prefilled(60, 63, 64), prefilled(65, 70, 71), prefilled(5, 10, 11)]
    scheduler = Scheduler(RopeLengths(64, computed_anew=True), [])
    schedule_running = rope_lengths._schedule_running.build(lambda self, seqs, *rest: [True, True, False])
    assert schedule_running(scheduler, running) == [False, True, False]
    assert schedule_running(Scheduler(None, []), running) == [True, True, False]


@pytest.mark.parametrize(("length", "shared"), [(63, True), (64, False), (600, False)])
def test_blocks_are_shared_up_to_the_original_length(length, shared):
    met = []
    match = rope_lengths.PATCHES[0].build(lambda self, seq: met.append(seq))
    match(Scheduler(RopeLengths(64, computed_anew=False), []), sequence(0, length, length))
    assert bool(met) == shared


@pytest.mark.parametrize(
    ("config", "limit"), [(PHI3, 65), (DYNAMIC, 32), (LLAMA, 32)], ids=["phi3", "dynamic", "llama"]
)
def test_phi3_is_computed_anew_at_once(config, limit, monkeypatch):
    monkeypatch.setattr(activation, "_active", "cpu")
    engine = SimpleNamespace(
        model_config=SimpleNamespace(llm_config=config),
        cache_config=SimpleNamespace(max_prefill_token_num=32),
        scheduler=SimpleNamespace(block_trie=SimpleNamespace()),
    )
    maker = rope_lengths._inputs_maker.build(lambda engine: SimpleNamespace())(engine)
    assert engine.cache_config.max_prefill_token_num == limit
    for owner in (maker, engine.scheduler, engine.scheduler.block_trie):
        assert rope_lengths._lengths(owner) == rope_lengths.of_model(config)


def test_lmdeploys_own_devices_are_left_alone(monkeypatch):
    monkeypatch.setattr(activation, "_active", None)
    engine = SimpleNamespace(model_config=SimpleNamespace(llm_config=DYNAMIC, hf_config=None))
    maker = rope_lengths._inputs_maker.build(lambda engine: SimpleNamespace())(engine)
    assert not vars(maker)
