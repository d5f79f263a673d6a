"""The example server over a pool that is too small for what it is asked: every answer as the one alone."""

import random
import threading
from typing import Any

import pytest

from dlinfer.framework.mindie_ext import FinishReason, GenerationParams, GeneratorTorch
from examples.batching_server.blocks import Memory, Placed
from examples.batching_server.server import Answer, Server
from tests.e2e.harness import Lab
from tests.framework.mindie_ext.generators import Blocks, config_of, run, with_blocks


@pytest.fixture(scope="module")
def generator(lab: Lab) -> GeneratorTorch:
    return GeneratorTorch(config_of(lab.model("qwen2"), max_batch_size=16))


def alone(generator: GeneratorTorch, prompt: list[int], new: int) -> list[int]:
    blocks = Blocks(16)
    return run(generator, [blocks.request(10**6, prompt, new)])[0]


def test_random_requests_with_cancellations(generator: GeneratorTorch) -> None:
    """60 requests of random lengths, a sixth cancelled, 24 device blocks where some eight sequences would want 60."""
    rng = random.Random(3)
    asked = [
        ([rng.randrange(5, 900) for _ in range(rng.randrange(1, 90))], rng.randrange(1, 60))
        for _ in range(60)
    ]
    with_blocks(generator, 64, 0)
    expected = [alone(generator, prompt, new) for prompt, new in asked]
    with_blocks(generator, 24, 24)
    server = Server(generator)
    server.start()
    answers: list[Answer] = []
    clients: list[threading.Thread] = []
    streamed: dict[int, list[int]] = {}
    for number, (prompt, new) in enumerate(asked):
        answer = server.submit(prompt, GenerationParams(max_new_tokens=new, ignore_eos=True))
        answers.append(answer)
        quits = number % 6 == 5
        clients.append(threading.Thread(target=read, args=(answer, number, streamed, quits)))
        clients[-1].start()
    for client in clients:
        client.join(timeout=120)
        assert not client.is_alive()
    server.stop()
    for number, tokens in streamed.items():
        cancelled = number % 6 == 5
        assert tokens == expected[number][: len(tokens)]
        if not cancelled:
            assert tokens == expected[number]
            assert answers[number].finish_reason is FinishReason.REACH_MAX_OUTPUT_LEN
    assert len(server.memory.device) == server.memory.device.count == 24
    assert len(server.memory.host) == server.memory.host.count == 24
    assert server.swapped_out > 0
    assert len(generator.store) == 0


def read(answer: Answer, number: int, streamed: dict[int, list[int]], quits: bool) -> None:
    tokens: list[int] = []
    for token in answer:
        tokens.append(token)
        if quits and len(tokens) == 3:
            answer.cancel()
    streamed[number] = tokens


def test_a_request_that_can_never_fit_is_refused_at_once(generator: GeneratorTorch) -> None:
    with_blocks(generator, 4, 4)
    server = Server(generator)
    with pytest.raises(ValueError, match="5 blocks"):
        server.submit([7] * 40, GenerationParams(max_new_tokens=40))
    with pytest.raises(ValueError, match="max_new_tokens"):
        server.submit([7], GenerationParams())


def test_a_step_that_raises_reaches_every_client(
    generator: GeneratorTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_blocks(generator, 8, 0)
    server = Server(generator)
    answer = server.submit([7, 8], GenerationParams(max_new_tokens=4))

    def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(generator, "prefill", broken)
    with pytest.raises(RuntimeError, match="out of order"):
        server.serve()
    with pytest.raises(RuntimeError, match="out of order"):
        list(answer)


def test_partly_swapped_sequences_come_back_whole() -> None:
    memory = Memory(4, 2)
    first, second = Placed(), Placed()
    assert memory.grow(first, 3)
    assert memory.grow(second, 1)
    assert not memory.grow(second, 2)
    assert memory.swap_out(first, 5) == 2
    assert not first.is_whole
    assert memory.grow(second, 2)
    assert not memory.swap_in(first)
    memory.free(second)
    assert memory.swap_in(first)
    assert first.is_whole
    assert [kind for kind, _, _ in memory.take_moves()] == [1, 1, 0, 0]
    memory.free(first)
    assert (len(memory.device), len(memory.host)) == (4, 2)
