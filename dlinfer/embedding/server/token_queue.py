"""The queue of the embedding server. Each forward takes rows of several requests, up to a number of tokens."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from dlinfer.embedding.errors import EmbeddingQueueError
from dlinfer.embedding.tokens import Tokens


@dataclass(eq=False)
class _Request:
    """The rows of one request. taken: how many of them were given to a forward."""

    rows: Sequence[Tokens]
    done: asyncio.Future[list[Tensor]]
    results: list[Tensor] = field(default_factory=list)
    taken: int = 0

    def waiting(self) -> int:
        """Return the number of tokens that no forward has taken."""
        return sum(map(len, self.rows[self.taken :]))


class TokenQueue:
    """Computes the rows of requests, batch after batch, on one thread.

    Requests take turns: a forward takes one row of each, then the next of each. So a short request does not wait for
    all of a long one. A cancelled request leaves the queue, and a row that is being computed is computed to its end.

    compute: takes rows, and returns one tensor row for each. batch_tokens: the most tokens of a forward, except of a
    single longer row. queue_tokens: the most tokens that may wait.
    observe: called after each forward with its tokens, rows and seconds.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Tokens]], Tensor],
        batch_tokens: int,
        queue_tokens: int,
        observe: Callable[[int, int, float], None] = lambda *_: None,
    ) -> None:
        self._compute, self._observe = compute, observe
        self.batch_tokens, self.queue_tokens = batch_tokens, queue_tokens
        self._requests: deque[_Request] = deque()
        self._came = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "embedding")
        self._speed = 1000.0  # tokens a second, a guess until the first forward
        self.begun: float | None = None
        """When the running forward began, in seconds of ``time.monotonic``. None: none runs."""

    def waiting(self) -> int:
        """Return the number of tokens that wait."""
        return sum(request.waiting() for request in self._requests)

    async def submit(self, rows: Sequence[Tokens]) -> list[Tensor]:
        """Return the results of rows. Raises EmbeddingQueueError if the queue is full.

        An empty queue takes a request of any size.
        """
        tokens, waiting = sum(map(len, rows)), self.waiting()
        if waiting and waiting + tokens > self.queue_tokens:
            seconds = math.ceil((waiting + tokens - self.queue_tokens) / self._speed)
            raise EmbeddingQueueError(
                waiting=waiting, tokens=tokens, limit=self.queue_tokens, seconds=max(1, seconds)
            )
        request = _Request(rows, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._came.set()
        try:
            return await request.done
        finally:
            if request in self._requests:
                self._requests.remove(request)

    async def run(self) -> None:
        """Compute until this coroutine is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._came.wait()
            parts = self._take()
            if not parts:
                self._came.clear()
                continue
            rows = [row for _, row in parts]
            self.begun = time.monotonic()
            try:
                results = list(await loop.run_in_executor(self._thread, self._compute, rows))
            except Exception as error:  # noqa: BLE001 - it belongs to the requests, and the next batch may be right
                for request in {id(request): request for request, _ in parts}.values():
                    if not request.done.done():
                        request.done.set_exception(error)
                    if request in self._requests:
                        self._requests.remove(request)
                continue
            finally:
                seconds, self.begun = time.monotonic() - self.begun, None
            tokens = sum(map(len, rows))
            self._speed += 0.2 * (tokens / max(seconds, 1e-6) - self._speed)
            self._observe(tokens, len(rows), seconds)
            for (request, _), result in zip(parts, results, strict=True):
                request.results.append(result)
                if len(request.results) == len(request.rows) and not request.done.done():
                    request.done.set_result(request.results)

    def _take(self) -> list[tuple[_Request, Tokens]]:
        """Remove the rows of the next forward from the queue, and return them with their requests."""
        parts: list[tuple[_Request, Tokens]] = []
        tokens = 0
        while self._requests:
            request = self._requests[0]
            if request.done.done():  # it was cancelled, and its task has not run since
                self._requests.popleft()
                continue
            row = request.rows[request.taken]
            if parts and tokens + len(row) > self.batch_tokens:
                break
            tokens += len(row)
            parts.append((request, row))
            request.taken += 1
            self._requests.popleft()
            if request.taken < len(request.rows):
                self._requests.append(request)
        return parts
