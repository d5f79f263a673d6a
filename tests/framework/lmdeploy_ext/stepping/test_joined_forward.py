"""Decoding and prompts in one forward: whose rows are whose, and what is computed apart."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lmdeploy")

from lmdeploy.pytorch.model_inputs import ModelInputs, VisionModelInputs

from dlinfer.framework.lmdeploy_ext.stepping import joined_forward
from dlinfer.framework.lmdeploy_ext.stepping.joined_forward import _Joined, join, split

BLOCK = 4
HIDDEN = 3
CACHE = SimpleNamespace(window_size=-1, kernel_block_size=BLOCK)


def inputs(ids: list[int], lengths: list[int], history: list[int], blocks: list[list[int]], **other) -> Any:
    """Of sequences with so many new tokens behind so many old ones, in these blocks."""
    ends = [length + old for length, old in zip(lengths, history, strict=True)]
    fields = {
        "input_ids": torch.tensor([ids]),
        "seq_length": torch.tensor(lengths),
        "history_lengths": torch.tensor(history),
        "block_offsets": torch.tensor(blocks),
        "is_decoding": all(length == 1 for length in lengths),
        "num_ignored_history": torch.zeros(len(lengths), dtype=torch.long),
        "max_q_seqlen": max(lengths),
        "max_kv_seqlen": max(ends),
        "sum_kv_seqlen": sum(ends),
    }
    return ModelInputs(**fields | other)


def decoding(**other) -> Any:
    return inputs([7, 8], [1, 1], [5, 2], [[1, 2], [3, 0]], **other)


def prompts(**other) -> Any:
    return inputs([10, 11, 12, 20], [3, 1], [0, 4], [[4, 0, 0], [5, 6, 0]], is_decoding=False, **other)


def model(both: Any) -> dict[str, Any]:
    """A forward that tells of each row which token it was."""
    rows = both.input_ids[0].float()[None, :, None].expand(1, -1, HIDDEN)
    return {
        "hidden_states": rows.clone(),
        "model_metas": None,
        "seq_length": both.seq_length,
        "position_ids": both.input_ids.clone(),
    }


class Forward:
    """What a step calls, and what it was called with."""

    def __init__(self, **extra: Any) -> None:
        self.extra = extra
        self.calls: list[Any] = []

    async def __call__(self, both: Any) -> dict[str, Any]:
        self.calls.append(both)
        return model(both) | self.extra


def agent_of(cache: Any, **of_model: Any) -> Any:
    return SimpleNamespace(cache_config=cache, patched_model=SimpleNamespace(**of_model))


def two_steps(first: Any, second: Any, **extra: Any) -> tuple[list[Any], list[Any]]:
    forward = Forward(**extra)

    async def main() -> list[Any]:
        shared = _Joined(second, agent_of(CACHE), one_row_each=True)
        return [await shared.forward(forward, step) for step in (first, second)]

    return forward.calls, asyncio.run(main())


def tokens(output: dict[str, Any]) -> list[int]:
    return output["hidden_states"][0, :, 0].long().tolist()


def test_rows_of_both_in_one_forward():
    calls, (first, second) = two_steps(decoding(), prompts())
    (both,) = calls
    assert both.input_ids.tolist() == [[7, 8, 10, 11, 12, 20]]
    assert both.seq_length.tolist() == [1, 1, 3, 1] and both.history_lengths.tolist() == [5, 2, 0, 4]
    assert both.block_offsets.tolist() == [[1, 2, 0], [3, 0, 0], [4, 0, 0], [5, 6, 0]]
    assert (both.max_q_seqlen, both.max_kv_seqlen, both.sum_kv_seqlen) == (3, 6, 17)
    assert not both.is_decoding
    assert tokens(first) == [7, 8] and tokens(second) == [10, 11, 12, 20]
    assert first["seq_length"].tolist() == [1, 1] and second["seq_length"].tolist() == [3, 1]
    assert first["position_ids"].tolist() == [[7, 8]] and second["position_ids"].tolist() == [
        [10, 11, 12, 20]
    ]


def test_a_row_that_lost_its_block_to_a_prompt_is_left_out():
    """The first sequence's next slot is the second of block 4, which a prompt of three tokens writes."""
    stale = inputs([7, 8], [1, 1], [1, 2], [[4, 0], [3, 0]])
    calls, (first, second) = two_steps(stale, prompts())
    (both,) = calls
    assert both.input_ids.tolist() == [[8, 10, 11, 12, 20]]
    assert both.block_offsets[0].tolist() == [3, 0, 0]
    assert tokens(first) == [0, 8] and tokens(second) == [10, 11, 12, 20]


def test_a_row_beyond_what_a_prompt_writes_in_its_block_is_computed():
    calls, (first, _) = two_steps(inputs([7], [1], [3], [[4]]), prompts())
    assert len(calls) == 1 and tokens(first) == [7]


def test_where_all_rows_lost_their_blocks_steps_are_computed_apart():
    calls, (first, second) = two_steps(inputs([7], [1], [1], [[4]]), prompts())
    assert [call.input_ids.numel() for call in calls] == [1, 4]
    assert tokens(first) == [7] and tokens(second) == [10, 11, 12, 20]


@pytest.mark.parametrize(
    "first, second",
    [
        ({}, {"vision_inputs": VisionModelInputs()}),
        ({"state_offsets": torch.tensor([0, 1])}, {}),
        ({}, {"local_adapter_ids": torch.tensor([1, 0])}),
        ({}, {"model_metas": [{"seen": 1}, None]}),
        ({}, {"target_hidden_states": torch.zeros(1)}),
    ],
    ids=["pictures", "states", "adapters of one alone", "metas", "drafts"],
)
def test_what_has_more_than_rows_is_computed_apart(first, second):
    calls, outputs = two_steps(decoding(**first), prompts(**second))
    assert [call.input_ids.numel() for call in calls] == [2, 4]
    assert [tokens(output) for output in outputs] == [[7, 8], [10, 11, 12, 20]]


def test_drafts_are_verified_apart():
    """The prompts' forward may return the rows of last tokens alone."""
    drafts = inputs([7, 9, 8], [2, 1], [5, 2], [[1, 2], [3, 0]], is_decoding=True)
    calls, outputs = two_steps(drafts, prompts())
    assert [call.input_ids.numel() for call in calls] == [3, 4]
    assert [tokens(output) for output in outputs] == [[7, 9, 8], [10, 11, 12, 20]]


def test_what_a_model_gives_beside_hidden_states_is_computed_apart():
    calls, outputs = two_steps(decoding(), prompts(), all_routed_experts=torch.zeros(6, 2))
    assert [call.input_ids.numel() for call in calls] == [6, 2, 4]
    assert [tokens(output) for output in outputs] == [[7, 8], [10, 11, 12, 20]]


def test_adapters_positions_and_flags():
    of_both = join(
        decoding(local_adapter_ids=torch.tensor([1, 2]), mrope_pos_ids=torch.zeros(3, 2)),
        prompts(local_adapter_ids=torch.tensor([3, 0]), mrope_pos_ids=torch.ones(3, 4), is_chunk=True),
    )
    assert of_both is not None
    assert of_both.local_adapter_ids.tolist() == [1, 2, 3, 0]
    assert of_both.mrope_pos_ids.shape == (3, 6)
    assert not of_both.is_chunk  # what becomes of the chunk's rows is its own step's


def test_the_window_of_a_cache_moves_slots():
    cache = SimpleNamespace(window_size=8, kernel_block_size=BLOCK)
    shared = _Joined(prompts(), agent_of(cache), one_row_each=True)
    moved = inputs([7], [1], [9], [[4]], num_ignored_history=torch.tensor([8]))
    assert shared._kept_rows(moved) is not None  # slot 1 of block 4
    beyond = inputs([7], [1], [9], [[4, 9, 9]], num_ignored_history=torch.tensor([0]))
    assert shared._kept_rows(beyond) is None


def test_hidden_states_of_the_second_are_views():
    """No copy of a prompt's rows is made."""
    both = join(decoding(), prompts())
    output = model(both)
    parts = split(output, decoding(), prompts(), None)
    assert parts is not None
    assert parts[1]["hidden_states"].untyped_storage().data_ptr() == output["hidden_states"].data_ptr()


class Head:
    """A head whose logits are its hidden states, and how many rows it was called with."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(hidden.shape[1])
        return hidden.clone()


def logits_of_two_steps(second: dict[str, Any], **extra: Any) -> tuple[list[int], list[list[int]]]:
    """As LMDeploy's agent asks: each step its forward, then logits of each sequence's last row or of all."""
    agent = agent_of(CACHE)
    joined_forward.expect(agent, second)
    shared, head, found = getattr(agent, joined_forward._NAME), Head(), []

    async def main() -> None:
        for step in (decoding(), second["inputs"]):
            output = await shared.forward(Forward(**extra), step)
            rows = step.seq_length.cumsum(0) - 1
            hidden = (
                output["hidden_states"] if second.get("return_logits") else output["hidden_states"][:, rows]
            )
            found.append(shared.logits(head, hidden)[0, :, 0].long().tolist())

    asyncio.run(main())
    return head.rows, found


def test_logits_of_both_at_once():
    assert logits_of_two_steps({"inputs": prompts()}) == ([4], [[7, 8], [12, 20]])


def test_all_logits_of_prompts_are_computed_apart():
    rows, found = logits_of_two_steps({"inputs": prompts(), "return_logits": True})
    assert (rows, found) == ([2, 4], [[7, 8], [10, 11, 12, 20]])


def test_logits_of_forwards_that_were_computed_apart():
    rows, found = logits_of_two_steps({"inputs": prompts()}, all_routed_experts=torch.zeros(6, 2))
    assert (rows, found) == ([2, 2], [[7, 8], [12, 20]])


class TestQueue:
    @staticmethod
    def agent() -> Any:
        kept: list[Any] = []
        alone = SimpleNamespace(rank=0, dist_config=SimpleNamespace(world_size=1))
        queue = asyncio.Queue()
        return SimpleNamespace(_in_que=queue, _keep_h2d_transfer=kept.append, kept=kept, dist_ctx=alone)

    def test_takes_what_comes_in_time(self):
        async def main() -> Any:
            agent = self.agent()
            asyncio.get_running_loop().call_later(
                0.01, agent._in_que.put_nowait, {"inputs": 1, "_h2d_transfer": 2}
            )
            return await joined_forward.following(agent, 20), agent.kept

        assert asyncio.run(main()) == ({"inputs": 1}, [2])

    def test_nothing_comes(self):
        async def main() -> Any:
            agent = self.agent()
            found = await joined_forward.following(agent, 0.01)
            agent._in_que.put_nowait({"later": 1})
            return found, agent._in_que.qsize()  # which nobody took

        assert asyncio.run(main()) == (None, 1)

    @pytest.mark.parametrize("ticks", range(5))
    def test_a_cancellation_that_meets_a_step_is_not_lost(self, ticks: int):
        """asyncio.wait_for gives the step then, before Python 3.12, and the loop goes on as if nothing was."""

        async def main() -> bool:
            agent = self.agent()
            waits = asyncio.ensure_future(joined_forward.following(agent, 20))
            await asyncio.sleep(0.01)
            agent._in_que.put_nowait({"inputs": 1})
            for _ in range(ticks):
                await asyncio.sleep(0)
            had_ended = waits.done()
            waits.cancel()
            await asyncio.wait([waits])
            return had_ended or waits.cancelled()

        assert asyncio.run(main())


class TestCanJoin:
    AGENT = SimpleNamespace(
        spec_agent=SimpleNamespace(is_enabled=lambda: False),
        model_config=SimpleNamespace(model_paradigm="ar"),
    )

    def test_a_prompt_behind_decoding(self):
        assert joined_forward.can_join(
            self.AGENT, {"delta": object()}, {"inputs": prompts(), "swap_in_map": {}}
        )

    @pytest.mark.parametrize(
        "second",
        [
            {"inputs": None, "delta": object()},
            {"inputs": decoding()},
            {"inputs": prompts(), "swap_in_map": {1: 2}},
            {"inputs": prompts(), "cache_inputs": object()},
            {"inputs": prompts(), "return_routed_experts": True},
        ],
        ids=["decoding", "first decoding", "swapped blocks", "checkpoints", "experts"],
    )
    def test_others_are_steps_of_their_own(self, second):
        assert not joined_forward.can_join(self.AGENT, {}, second)

    def test_drafts_are_not_joined(self):
        agent = SimpleNamespace(spec_agent=SimpleNamespace(is_enabled=lambda: True))
        assert not joined_forward.can_join(agent, {}, {"inputs": prompts()})

    def test_blocks_of_diffusion_are_not_joined(self):
        model = SimpleNamespace(model_paradigm="dllm")
        agent = SimpleNamespace(spec_agent=self.AGENT.spec_agent, model_config=model)
        assert not joined_forward.can_join(agent, {}, {"inputs": prompts()})


def test_an_error_of_the_first_leaves_nothing_behind():
    agent = agent_of(CACHE)

    async def fails() -> None:
        assert getattr(agent, joined_forward._NAME) is not None
        raise RuntimeError("no")

    with contextlib.suppress(RuntimeError):
        asyncio.run(joined_forward.joined(agent, fails, fails, {"inputs": prompts()}))
    assert getattr(agent, joined_forward._NAME) is None
