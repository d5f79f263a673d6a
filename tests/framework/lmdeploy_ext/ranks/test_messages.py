"""LMDeploy's messages to ranks: in order and whole, never ahead of a slow reader, and past killed ones."""

import asyncio
import multiprocessing
import threading
import time
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.engine.executor.mp_executor import (
    NUM_SHARED_BLOCK,
    SHARED_BLOCK_SIZE,
    Notifier,
    SharedBuffer,
)

PytorchEngineConfig(device_type="cpu")
CONTEXT = multiprocessing.get_context("spawn")


@pytest.fixture
def buffers():
    """A sender and two receivers, here in one process; each has its own state, as after a spawn."""
    notifier: Any = Notifier(2, CONTEXT)
    sender = SharedBuffer(-1, notifier)
    receivers = []
    for place in range(2):
        own: Any = Notifier(2, CONTEXT)
        own.sent, own.free, own.receiver = notifier.sent, notifier.free, place
        receivers.append(SharedBuffer(place, own, sender.name()))
    yield sender, receivers
    for receiver in receivers:
        receiver.close()
    sender.close()


def test_messages_arrive_in_order_and_whole(buffers):
    sender, receivers = buffers
    messages = [bytes([i % 256]) * size for i, size in enumerate([10, SHARED_BLOCK_SIZE * 2 + 7, 3] * 30)]
    received: list[list[bytes]] = [[], []]

    def receive(place: int) -> None:
        for _ in messages:
            received[place].append(receivers[place].receive())
            time.sleep(0.002 * place)  # the second is slow

    threads = [threading.Thread(target=receive, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for message in messages:
        sender.send(message)
    for thread in threads:
        thread.join()
    assert received == [messages, messages]


def test_only_those_that_are_meant_get_it(buffers):
    sender, (first, second) = buffers
    sender.send("one", receiver_mask=0b01)
    sender.send("both")
    assert (first.receive(), first.receive()) == ("one", "both")
    assert (second.receive(), second.receive()) == (None, "both")


def test_a_reader_that_is_behind_holds_the_sender(buffers):
    sender, (first, second) = buffers
    sent = []

    def send() -> None:
        for i in range(NUM_SHARED_BLOCK + 3):
            sender.send(i)
            sent.append(i)

    thread = threading.Thread(target=send)
    thread.start()
    assert [first.receive() for _ in range(NUM_SHARED_BLOCK - 1)] == list(range(NUM_SHARED_BLOCK - 1))
    time.sleep(0.3)
    assert len(sent) == NUM_SHARED_BLOCK - 1
    assert [second.receive() for _ in range(NUM_SHARED_BLOCK + 3)] == list(range(NUM_SHARED_BLOCK + 3))
    assert [first.receive() for _ in range(4)] == list(range(NUM_SHARED_BLOCK - 1, NUM_SHARED_BLOCK + 3))
    thread.join()


def test_a_wait_ends_with_what_the_check_raises(buffers):
    _, (first, _) = buffers

    def raises() -> None:
        raise KeyError("a rank has ended")

    first.notifier.check = raises
    with pytest.raises(KeyError, match="a rank has ended"):
        first.receive()
    with pytest.raises(KeyError, match="a rank has ended"):
        asyncio.run(first.receive_async())


def test_a_wait_ends_when_the_buffer_closes(buffers):
    _, (first, _) = buffers
    threading.Timer(0.1, first.notifier.close).start()
    with pytest.raises(asyncio.CancelledError):
        first.receive()


def test_a_rank_computes_while_it_waits(buffers):
    sender, (first, _) = buffers

    async def receive() -> tuple[int, object]:
        waits = asyncio.ensure_future(first.receive_async())
        ticks = 0
        while not waits.done():
            await asyncio.sleep(0.01)
            ticks += 1
            if ticks == 5:
                sender.send("here")
        return ticks, await waits

    ticks, message = asyncio.run(receive())
    assert ticks >= 5 and message == "here"


def _reader(notifier: Any, name: str) -> None:
    notifier.receiver = 1
    SharedBuffer(1, notifier, name).receive()


def test_a_reader_that_was_killed_while_it_waited(buffers):
    """LMDeploy's own event would wait for it to wake up."""
    sender, (first, _) = buffers
    killed = multiprocessing.get_context("fork").Process(
        target=_reader, args=(sender.notifier, sender.name())
    )
    killed.start()
    time.sleep(0.3)
    killed.kill()
    killed.join()
    sender.send("here")
    assert first.receive() == "here"
