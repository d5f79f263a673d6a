"""Continuous batching over GeneratorTorch: a queue, admission by free blocks, mixed steps, swapping, streaming.

Each step: requests that were cancelled give their blocks back; running sequences get the block that their next token
needs, for which younger ones are swapped out where blocks run short; those that were swapped out come back, oldest
first; new requests are admitted while blocks and the step's token budget last; then one mixed step computes them all.

Admission promises only what can be kept: the blocks that all admitted requests may come to need fit into device and
host together, so the oldest one can always go on.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dlinfer.framework.mindie_ext import FinishReason, GenerationParams, GeneratorTorch, Request
from examples.batching_server.blocks import Memory, Placed


@dataclass
class Answer:
    """A request that was submitted: iterate over it for its tokens as they come.

    tokens: those so far. finish_reason: set with the last token; None while it runs, or where it was cancelled.
    """

    request: Request
    max_blocks: int
    placed: Placed = field(default_factory=Placed)
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cancelled: bool = False
    _stream: "queue.SimpleQueue[int | BaseException | None]" = field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[int]:
        while (token := self._stream.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            yield token

    def cancel(self) -> None:
        """Ask for no more tokens; the server frees the request's blocks before its next step."""
        self.cancelled = True

    def end(self, error: BaseException | None = None) -> None:
        """Called by the server when no further token comes."""
        self._stream.put(error)

    def push(self, token: int) -> None:
        """Called by the server with each token."""
        self.tokens.append(token)
        self._stream.put(token)

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.request.input_length + len(self.tokens)


class Server:
    """Drives one generator from a thread of its own, between ``start()`` and ``stop()``; or step by step."""

    def __init__(
        self, generator: GeneratorTorch, max_batch_size: int = 16, max_step_tokens: int = 512
    ) -> None:
        settings = generator.pool("Server").kvcache_settings
        self.generator = generator
        self.block_size = settings.block_size
        self.memory = Memory(settings.num_npu_blocks, settings.num_cpu_blocks)
        self.max_batch_size = max_batch_size
        self.max_step_tokens = max_step_tokens
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []
        self.steps = self.swapped_out = 0
        self._ids = itertools.count()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # --- for clients

    def submit(
        self,
        prompt: list[int],
        params: GenerationParams | None = None,
        sampling_params: np.ndarray | None = None,
    ) -> Answer:
        """Queue a request. params.max_new_tokens is needed. Raises ValueError for one that can never be admitted."""
        params = params or GenerationParams(max_new_tokens=16)
        if not prompt or params.max_new_tokens is None or params.max_new_tokens < 1:
            raise ValueError("a request needs a prompt and max_new_tokens")
        request = Request.request_from_token(prompt, sampling_params, params, next(self._ids))
        blocks = self._blocks(len(prompt) + params.max_new_tokens)
        if blocks > self.memory.device.count or len(prompt) > self.max_step_tokens:
            raise ValueError(f"the request needs {blocks} blocks and {len(prompt)} tokens in a step")
        answer = Answer(request, blocks)
        with self._wake:
            self.waiting.append(answer)
            self._wake.notify()
        return answer

    def start(self) -> None:
        """Serve from a thread."""
        self._thread = threading.Thread(target=self.serve, name="batching-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish what was submitted, then end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def serve(self) -> None:
        """Step until ``stop()`` was called and all is done. An error of a step goes to every client, and is raised."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self.waiting or self.running or self._stopping)
                if not (self.waiting or self.running):
                    return
            try:
                self.step()
            except Exception as error:
                for answer in [*self.running, *self.waiting]:
                    answer.end(error)
                raise

    # --- one step

    def step(self) -> None:
        """Compute one token of each running request, and the prompts of newly admitted ones."""
        self._drop_cancelled()
        decoding = self._make_room()
        admitted = self._admit(len(decoding))
        moves = self.memory.take_moves()
        if moves:
            self.generator.swap([moves])
        batch = decoding + admitted
        if not batch:
            return
        for answer in batch:
            answer.request.block_tables = np.asarray(answer.placed.on_device, dtype=np.int32)
            answer.request.split_end_position = answer.request.input_length
        requests = [answer.request for answer in batch]
        if not admitted:
            output = self.generator.decode(requests)
        elif not decoding:
            output = self.generator.prefill(requests)
        else:
            kinds = np.asarray([False] * len(decoding) + [True] * len(admitted))
            output = self.generator.generate_mix(requests, kinds)
        self.steps += 1
        for index, answer in enumerate(batch):
            answer.push(int(output.token_ids[index, 0]))
            if output.finish_reason[index]:
                answer.finish_reason = FinishReason(output.finish_reason[index])
                self._release(answer)

    def _drop_cancelled(self) -> None:
        for answer in [one for one in self.running if one.cancelled]:
            self._release(answer)
        with self._wake:
            for answer in [one for one in self.waiting if one.cancelled]:
                self.waiting.remove(answer)
                answer.end()

    def _make_room(self) -> list[Answer]:
        """The running requests that have all their blocks on the device for one token more, oldest first."""
        ready: list[Answer] = []
        for position, answer in enumerate(self.running):
            if len(ready) == self.max_batch_size:
                break
            if self._fits(answer, self.running[position + 1 :]):
                ready.append(answer)
        return ready

    def _fits(self, answer: Answer, younger: list[Answer]) -> bool:
        """Bring a request's blocks to the device, and give it one for its next token; younger ones make room."""
        needed = self._blocks(answer.length)
        missing = needed - len(answer.placed.on_device) - len(self.memory.device)
        for other in reversed(younger):
            if missing <= 0:
                break
            moved = self.memory.swap_out(other.placed, missing)
            self.swapped_out += moved
            missing -= moved
        return self.memory.swap_in(answer.placed) and self.memory.grow(answer.placed, needed)

    def _admit(self, decoding: int) -> list[Answer]:
        admitted: list[Answer] = []
        tokens = decoding
        promised = sum(one.max_blocks for one in self.running)
        everything = self.memory.device.count + self.memory.host.count
        with self._wake:
            while self.waiting and decoding + len(admitted) < self.max_batch_size:
                answer = self.waiting[0]
                tokens += answer.request.input_length
                promised += answer.max_blocks
                if tokens > self.max_step_tokens or promised > everything:
                    break
                if not all(one.placed.is_whole for one in self.running):
                    break  # those that wait on the host come first
                if not self.memory.grow(answer.placed, self._blocks(answer.request.input_length)):
                    break
                admitted.append(self.waiting.popleft())
                self.running.append(answer)
        return admitted

    def _release(self, answer: Answer) -> None:
        self.running.remove(answer)
        self.memory.free(answer.placed)
        self.generator.clear_cache(answer.request.sequences)
        answer.end()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
