"""Block diffusion: rows of a step, where answers end, and which tokens of a block a step decides."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("lmdeploy")

from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch import consts
from lmdeploy.pytorch.config import DLLMConfig, UnmaskingStrategy
from lmdeploy.pytorch.messages import SamplingParam, SchedulerSession, SequenceMeta
from lmdeploy.pytorch.strategies.dllm.model_agent import DLLMExtraInputs, DLLMStoppingCriteria
from lmdeploy.pytorch.strategies.dllm.sampling import DLLMSamplingStrategy
from lmdeploy.pytorch.strategies.dllm.sequence import DLLMSequenceStrategy
from lmdeploy.pytorch.strategies.dllm.unmasking import UnmaskingProcessor

LENGTH, MASK = 4, 99


@pytest.fixture(autouse=True)
def on_a_device():
    PytorchEngineConfig(device_type="cpu")


def sequence(prompt: int, **param: Any) -> Any:
    """A sequence of LMDeploy's with a prompt of so many tokens."""
    strategy = DLLMSequenceStrategy(LENGTH, MASK)
    meta = SequenceMeta(64, strategy=strategy, sampling_strategy=DLLMSamplingStrategy(0, LENGTH))
    session = SchedulerSession(1, meta, lifecycle=cast(Any, None))
    made: Any = strategy.make_sequence(0, session, SamplingParam(**param))
    made.update_token_ids(list(range(10, 10 + prompt)))
    return made


@pytest.mark.parametrize("prompt", [1, 4, 6, 8])
def test_the_answer_begins_behind_the_prompt(prompt):
    seq = sequence(prompt)
    assert seq.output_start_pos == seq.num_valid_ids == prompt
    assert len(seq.token_ids) == -(-prompt // LENGTH) * LENGTH


def test_each_row_has_the_options_of_its_sequence():
    seqs = [
        sequence(6, temperature=0.5, top_k=3, top_p=0.5, stop_words=[7], random_seed=1),
        sequence(8, temperature=2.0, top_k=5, top_p=0.9, stop_words=[8, 9], random_seed=2, min_new_tokens=6),
    ]
    inputs = DLLMSamplingStrategy(0, LENGTH).make_sampling_inputs(seqs)
    assert inputs.batch_size == 8
    assert inputs.temperature.tolist() == [0.5] * 4 + [2.0] * 4
    assert inputs.top_k.tolist() == [3] * 4 + [5] * 4
    assert inputs.random_seeds.tolist() == [1] * 4 + [2] * 4
    assert inputs.stop_words.tolist() == [[7, -1]] * 4 + [[8, 9]] * 4
    # The first block of the first sequence begins with two tokens of the prompt.
    assert inputs.num_ignore_eos.tolist() == [2, 1, 0, -1, 6, 5, 4, 3]
    offsets = inputs.random_offsets.view(2, LENGTH)
    assert offsets[:, 0].tolist() == [6, 8]
    assert (offsets.diff() > 1 << 20).all()


def step(tokens, stops, left, begins, history, masks=None):
    """(stopped, stop_pos) of blocks of B sequences, as lists."""
    count = len(tokens)
    mask = torch.full((count, LENGTH), consts.DLLM_UNMASKED, dtype=torch.uint8)
    if masks is not None:
        mask = torch.tensor(masks, dtype=torch.uint8)
    criteria = DLLMStoppingCriteria(torch.tensor(left), torch.tensor(begins))
    stopped, place, _ = criteria.step(
        torch.tensor(tokens).flatten(),
        torch.tensor(stops).repeat_interleave(LENGTH, 0),
        inputs=SimpleNamespace(
            history_lengths=torch.tensor(history), seq_length=torch.tensor([LENGTH] * count)
        ),
        extra_inputs=DLLMExtraInputs(mask.flatten()),
    )
    return stopped.tolist(), place.tolist()


def test_an_answer_ends_at_the_first_stop_word_of_its_own():
    tokens = [[1, 7, 2, 7], [7, 1, 2, 3], [8, 8, 1, 9]]
    stops = [[7, -1], [8, 9], [9, -1]]
    assert step(tokens, stops, [50] * 3, [0] * 3, [8] * 3) == ([True, False, True], [1, 49, 3])


def test_the_prompt_does_not_end_an_answer():
    tokens, stops = [[7, 7, 1, 2], [7, 1, 7, 2]], [[7, -1], [7, -1]]
    assert step(tokens, stops, [50] * 2, [10, 9], [8] * 2) == ([False, True], [49, 2])


@pytest.mark.parametrize(("place", "ends"), [(0, 0), (1, 1), (2, 1), (3, 1)])
def test_a_stop_word_ends_an_answer_before_its_length_does(place, ends):
    """Two tokens of the block are left."""
    tokens = [[1 + (7 - 1) * (i == place) for i in range(LENGTH)]]
    assert step(tokens, [[7]], [2], [0], [8]) == ([True], [ends])


def test_a_block_that_is_not_decided_ends_nothing():
    masks = [[consts.DLLM_UNMASKED] * 3 + [consts.DLLM_MASKED]]
    assert step([[7, 7, 7, 7]], [[7]], [50], [0], [8], masks)[0] == [False]


def decided(masks: list[int], scores: list[float], steps: int, threshold: float = 0.5) -> list[int]:
    config = DLLMConfig(LENGTH, UnmaskingStrategy.LOW_CONFIDENCE_DYNAMIC, steps, threshold)
    logits = torch.tensor(scores)[:, None].log().expand(-1, 2).clone()
    logits[:, 1] = (1 - torch.tensor(scores)).log()
    mask = torch.tensor(masks, dtype=torch.uint8)
    after, _ = UnmaskingProcessor(config)(
        logits, torch.zeros(LENGTH, dtype=torch.long), torch.zeros(LENGTH, dtype=torch.long), mask
    )
    return after.tolist()


@pytest.mark.parametrize(
    ("masks", "scores", "steps", "after"),
    [
        ([0, 0, 0, 0], [0.1, 0.3, 0.2, 0.05], 4, [0, 1, 0, 0]),
        ([0, 0, 0, 0], [0.1, 0.3, 0.2, 0.05], 2, [0, 1, 1, 0]),
        ([0, 0, 0, 0], [0.1, 0.9, 0.8, 0.7], 4, [0, 1, 1, 1]),
        ([0, 0, 0, 0], [0.1, 0.9, 0.2, 0.3], 2, [0, 1, 0, 1]),
        ([1, 0, 1, 0], [0.9, 0.1, 0.9, 0.2], 4, [1, 0, 1, 1]),
        ([1, 1, 1, 0], [0.9, 0.9, 0.9, 0.2], 2, [1, 1, 1, 1]),
        ([1, 1, 1, 1], [0.9, 0.9, 0.9, 0.9], 4, [2, 2, 2, 2]),
    ],
)
def test_certain_tokens_are_decided_or_else_the_best_few(masks, scores, steps, after):
    """Masks: 0 for a masked token, 1 for a decided one, 2 for one of a block that is cached now."""
    assert decided(masks, scores, steps) == after
