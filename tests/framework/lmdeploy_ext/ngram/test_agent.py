"""A step of drafts: which rows it computes, which tokens it draws, and what it looks up for the next step."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.devices import DeviceContext, get_device_manager
from lmdeploy.pytorch.engine.logits_process import SamplingInputs
from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy.pytorch.strategies.ar_spec.model_agent import ARSpecExtraInputs

from dlinfer.framework.lmdeploy_ext.faults.sampling.texts import START, Rules, Start, Texts
from tests.e2e.sampling_oracle import chi_square

MOST = 3


@pytest.fixture(autouse=True)
def on_the_cpu():
    PytorchEngineConfig(device_type="cpu")
    with get_device_manager().context(DeviceContext("cpu")):
        yield


@pytest.fixture
def agent() -> Any:
    from dlinfer.framework.lmdeploy_ext.ngram.agent import NgramAgent
    from dlinfer.framework.lmdeploy_ext.ngram.method import config

    context = SimpleNamespace(rank=0, dist_config=None)
    misc = SimpleNamespace(logprobs_mode="raw_logprobs")
    return NgramAgent(config(MOST, None), None, None, None, misc, context, "cpu")


class Batch:
    """Sequences of these texts, each with a seed of its own."""

    def __init__(self, prompts: list[list[int]], *, greedy: bool = False) -> None:
        self.texts, size = Texts(), len(prompts)
        rules = Rules(has_drafts=True, is_searched=True)
        nothing = np.array([], np.int64)
        starts = [Start(rules, np.array(prompt), nothing, len(prompt)) for prompt in prompts]
        contexts: list[dict[str, Any]] = [
            {"session_id": number, "seq_id": 0, START: start} for number, start in enumerate(starts)
        ]
        self.sampling = SamplingInputs(
            max_top_k=1 if greedy else 0,
            random_seeds=torch.arange(size),
            random_offsets=torch.zeros(size, dtype=torch.long),
            num_ignore_eos=torch.zeros(size, dtype=torch.long),
            logits_processors=[[]] * size,
            max_num_logprobs=2,
            session_ctx=contexts,
            batch_size=size,
        )
        self.begin()
        for context in contexts:
            del context[START]

    def begin(self, drafts: list[list[int]] | None = None) -> None:
        self.texts.begin(self.sampling, drafts)

    def decode(self, drafts: list[list[int]]) -> tuple[ModelInputs, ARSpecExtraInputs]:
        """A decoding step that verifies these drafts, -1 where one is missing."""
        self.begin(drafts)
        size = len(drafts)
        ids = torch.tensor([[7, *row] for row in drafts])
        inputs = ModelInputs(
            input_ids=ids.flatten()[None],
            seq_length=torch.full((size,), ids.shape[1]),
            history_lengths=torch.arange(size),
            block_offsets=torch.zeros(size, 1, dtype=torch.long),
            is_decoding=True,
            num_ignored_history=torch.zeros(size, dtype=torch.long),
            max_q_seqlen=ids.shape[1],
            max_kv_seqlen=99,
            sum_kv_seqlen=99,
        )
        return inputs, ARSpecExtraInputs(output_draft_token_ids=ids[:, 1:])


def test_rows_of_missing_drafts_are_left_out(agent: Any):
    inputs, _ = Batch([[1]] * 3).decode([[3, 4, -1], [-1, -1, -1], [5, 6, 8]])
    inputs.mrope_pos_ids = torch.arange(36).view(3, 12)
    rows = agent.present_rows(inputs, is_timed=True)
    assert rows.input_ids.tolist() == [[7, 3, 4, 7, 7, 5, 6, 8]]
    assert rows.seq_length.tolist() == [3, 1, 4]
    assert rows.max_q_seqlen == 4
    assert rows.mrope_pos_ids[0].tolist() == [0, 1, 2, 4, 8, 9, 10, 11]
    assert inputs.seq_length.tolist() == [4, 4, 4]


def draw(agent: Any, batch: Batch, drafts: list[list[int]], logits: torch.Tensor) -> Any:
    inputs, extra = batch.decode(drafts)
    extra.target_logits = logits
    return asyncio.run(agent.draw(logits[:0], inputs, extra, batch.sampling))


def test_greedy_tokens_up_to_the_first_wrong_draft(agent: Any):
    drafts = [[3, 4, -1], [-1, -1, -1], [5, 6, 8]]
    said = [3, 4, 9, 2, 5, 1, 8, 0]  # what the model says at each present row
    logits = torch.nn.functional.one_hot(torch.tensor(said), 10).float()
    result = draw(agent, Batch([[1]] * 3, greedy=True), drafts, logits)
    following, logprobs, tokens, extra = result
    assert tokens.tolist() == [[3, 4, 9, -1], [2, -1, -1, -1], [5, 1, -1, -1]]
    assert following.tolist() == extra.next_token_ids.tolist() == [9, 2, 1]
    assert extra.num_rejected_tokens.tolist() == [1, 3, 2]
    assert logprobs.indices[:, 0].tolist() == tokens.flatten().tolist()
    own = logits.log_softmax(-1)[torch.arange(8), torch.tensor(said)]
    kept = logprobs.vals[:, 0][tokens.flatten() >= 0]
    torch.testing.assert_close(kept, own[torch.tensor([0, 1, 2, 3, 4, 5])])


@pytest.mark.parametrize("draft", [0, 2, 5])
def test_draws_have_the_target_s_distribution(agent: Any, draft: int):
    """Whatever the draft is: of the first token, and of the second where the draft was accepted."""
    size = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0], [0.0, 0.3, 0.6, 0.9, 1.2, 1.5]])
    rows = logits.repeat(size, 1)
    tokens = draw(agent, Batch([[1]] * size), [[draft, -1, -1]] * size, rows)[2]
    first, second = logits.double().softmax(-1).numpy()
    assert chi_square(np.bincount(tokens[:, 0], minlength=6), first) < 20.5  # 5 degrees of freedom, 0.1 %
    accepted = tokens[:, 0] == draft
    assert (tokens[:, 1] >= 0).tolist() == accepted.tolist()
    assert chi_square(np.bincount(tokens[accepted, 1], minlength=6), second) < 20.5


def test_draws_are_those_of_the_seed_without_drafts(agent: Any):
    size = 500
    logits = torch.randn(MOST + 1, 6, generator=torch.Generator().manual_seed(0))
    alone, drafted = Batch([[1]] * size), Batch([[1]] * size)
    wanted = []
    for place in range(MOST + 1):
        tokens = draw(agent, alone, [[-1] * MOST] * size, logits[place].repeat(size, 1))[2]
        alone.texts.add(alone.sampling, tokens)
        wanted.append(tokens[:, 0])
    drafts = torch.stack(wanted[:MOST], 1)
    drafts[::2, 1] += 1  # wrong
    tokens = draw(agent, drafted, drafts.tolist(), logits.repeat(size, 1))[2]
    expected = torch.stack(wanted, 1)
    assert torch.equal(tokens[1::2], expected[1::2])
    assert torch.equal(tokens[::2, :2], expected[::2, :2])
    assert (tokens[::2, 2:] == -1).all()


def test_drafts_are_looked_up_after_a_step_without_drafts(agent: Any):
    """The first step of so many sequences measures what a step costs."""
    batch = Batch([[1, 2, 3, 4, 5, 1, 2], [8, 9]])
    prefill = ModelInputs(
        **{**vars(batch.decode([[-1] * MOST] * 2)[0]), "is_decoding": False, "max_q_seqlen": 7}
    )

    def look_up(inputs: Any, extra: Any) -> list[list[int]]:
        result = asyncio.run(agent.async_model_forward(inputs, extra, batch.sampling))
        return result.output_draft_token_ids.tolist()

    nothing = [[-1] * MOST] * 2
    assert look_up(prefill, ARSpecExtraInputs()) == nothing
    inputs, extra = batch.decode(nothing)
    agent.present_rows(inputs, is_timed=True)
    extra.output_token_ids = torch.tensor([[3, -1, -1, -1], [8, -1, -1, -1]])
    batch.texts.add(batch.sampling, extra.output_token_ids)
    assert look_up(inputs, extra) == [[-1] * MOST] * 2
    agent.present_rows(inputs, is_timed=True)
    extra.output_token_ids = torch.tensor([[4, -1, -1, -1], [4, -1, -1, -1]])
    batch.texts.add(batch.sampling, extra.output_token_ids)
    assert look_up(inputs, extra) == [[5, 1, 2], [-1] * MOST]


def test_an_unfinished_prompt_has_no_token_and_no_draft(agent: Any):
    inputs, _ = Batch([[1]]).decode([[-1] * MOST])
    inputs.is_decoding, inputs.is_chunk, inputs.is_last_chunk = False, True, False
    extra = asyncio.run(agent.async_model_forward(inputs, ARSpecExtraInputs(), None))
    assert extra.output_draft_token_ids.tolist() == [[-1] * MOST]
    assert extra.output_token_ids.tolist() == [[0]] and extra.num_rejected_tokens.tolist() == [0]
