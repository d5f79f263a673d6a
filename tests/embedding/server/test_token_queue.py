"""The queue: which rows one forward takes, what is refused, and what leaves it."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dlinfer.embedding import EmbeddingQueueError
from dlinfer.embedding.server.token_queue import TokenQueue
from dlinfer.embedding.tokens import Tokens


class Model:
    """Gives each row its first token. The first forward waits until ``go`` is set."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, rows: Sequence[Tokens]) -> Tensor:
        self.begun.set()
        assert self.go.wait(30)
        self.batches.append([row.ids[0] for row in rows])
        if any(row.ids[0] == 666 for row in rows):
            raise RuntimeError("broken")
        return torch.tensor([[float(row.ids[0])] for row in rows])


def rows(*numbers: int, length: int = 1) -> list[Tokens]:
    return [Tokens([number] * length) for number in numbers]


def served(
    work: Callable[[TokenQueue, Model], object], batch_tokens: int = 4, queue_tokens: int = 100
) -> Model:
    """Run the coroutine function ``work`` beside a queue, whose first forward has begun with a row of token 0."""
    model = Model()

    async def main() -> None:
        queue = TokenQueue(model, batch_tokens, queue_tokens)
        computing = asyncio.create_task(queue.run())
        first = asyncio.create_task(queue.submit(rows(0)))
        await asyncio.to_thread(model.begun.wait, 30)
        try:
            await asyncio.wait_for(work(queue, model), 30)  # pyright: ignore[reportArgumentType]
            assert [float(row) for row in await first] == [0.0]
            assert queue.waiting() == 0
        finally:
            model.go.set()
            computing.cancel()

    asyncio.run(main())
    return model


def test_requests_join_in_one_forward_and_take_turns():
    async def work(queue: TokenQueue, model: Model) -> None:
        many = asyncio.create_task(queue.submit(rows(*range(10, 17))))
        few = asyncio.create_task(queue.submit(rows(20, 21)))
        await asyncio.sleep(0)
        assert queue.waiting() == 9
        model.go.set()
        assert [float(row) for row in await few] == [20.0, 21.0]
        assert [float(row) for row in await many] == [float(number) for number in range(10, 17)]

    model = served(work)
    assert model.batches == [[0], [10, 20, 11, 21], [12, 13, 14, 15], [16]]


def test_a_row_longer_than_a_forward_runs_alone():
    async def work(queue: TokenQueue, model: Model) -> None:
        both = [asyncio.create_task(queue.submit(rows(number, length=9))) for number in (1, 2)]
        await asyncio.sleep(0)
        model.go.set()
        await asyncio.gather(*both)

    assert served(work).batches == [[0], [1], [2]]


def test_a_full_queue_refuses_but_an_empty_one_takes_anything():
    async def work(queue: TokenQueue, model: Model) -> None:
        large = asyncio.create_task(queue.submit(rows(1, length=30)))
        await asyncio.sleep(0)
        with pytest.raises(EmbeddingQueueError) as refused:
            await queue.submit(rows(2))
        assert refused.value.fields["seconds"] >= 1
        assert queue.waiting() == 30
        model.go.set()
        await large

    served(work, queue_tokens=10)


def test_a_cancelled_request_leaves():
    async def work(queue: TokenQueue, model: Model) -> None:
        gone = asyncio.create_task(queue.submit(rows(1, 2, 3)))
        stays = asyncio.create_task(queue.submit(rows(4)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert queue.waiting() == 1
        model.go.set()
        await stays

    assert served(work).batches == [[0], [4]]


def test_a_request_that_is_cancelled_while_it_is_computed():
    async def work(queue: TokenQueue, model: Model) -> None:
        gone = asyncio.create_task(queue.submit(rows(1, 2, 3, 4, 5)))
        await asyncio.sleep(0)
        model.begun.clear()
        model.go.set()
        await asyncio.to_thread(model.begun.wait, 30)
        gone.cancel()
        assert [float(row) for row in await queue.submit(rows(9))] == [9.0]

    assert 5 not in served(work).batches[-1]


def test_an_error_reaches_its_requests_only():
    async def work(queue: TokenQueue, model: Model) -> None:
        broken = asyncio.create_task(queue.submit(rows(666, 1, 2, 3, 4, 5)))
        await asyncio.sleep(0)
        model.go.set()
        with pytest.raises(RuntimeError, match="broken"):
            await broken
        assert [float(row) for row in await queue.submit(rows(7))] == [7.0]

    assert served(work).batches[-1] == [7]
