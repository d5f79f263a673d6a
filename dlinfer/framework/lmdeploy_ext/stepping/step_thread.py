"""Run the model's steps on a separate thread, so that the engine's event loop continues during a step.

LMDeploy's loop is written for asynchronous devices: while the device computes a step, the loop prepares the next inputs
and hands out results. On a host, a forward returns only when it is computed, and a prefill of a few thousand tokens
takes seconds. Without the thread, the engine would stream, admit and answer nothing meanwhile.
"""

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.sampling.steps import forget_before_scoring, texts_of
from dlinfer.framework.lmdeploy_ext.stepping import joined_forward, prompt_pace, prompt_turns
from dlinfer.framework.lmdeploy_ext.stepping.joined_forward import Step
from dlinfer.framework.patching import Original, replaces
from dlinfer.utils import computing

_T = TypeVar("_T")

_LATEST = 0.005
"""The most seconds that a step's outputs are held back until the next step computes."""
_FOLLOWS = 0.05
"""The most seconds that a decoding step waits for prompts that are to share its forward: ten times the usual wait."""

_NAME = "dlinfer_steps"
"""Attribute of a model agent that holds its StepThread."""


class StepThread:
    """Runs the steps of one model agent one after the other, on a thread with its own event loop.

    idle: a lock that is held while a step runs. Code that changes weights or caches takes this lock first.
    era: a number that grows whenever weights or caches are released. A step of an earlier era never runs.

    The engine's loop gets the outputs of a step once the next step computes. The loop needs a millisecond or two of
    Python for them, which would otherwise delay the next step. For the same reason the thread itself starts the next
    step if it is ready, instead of waiting until the loop wakes up.
    """

    def __init__(self) -> None:
        self.idle = threading.RLock()
        self.era = 0
        self._outputs: deque[Callable[[], None]] = deque()  # the previous step's, which the loop has to take
        self._running = False
        self._steps = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dlinfer-step")
        self._changes: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._host: asyncio.AbstractEventLoop | None = None
        self._clock: int | None = None

    async def run(
        self, step: Step, following: Callable[[], Step | None] = lambda: None, era: int | None = None
    ) -> None:
        """Run a step, then each step that ``following`` returns. Wait for them without blocking the caller's loop.

        following: a function that returns the next step, or None if none is ready. The thread calls it after each step.
        era: the value of the attribute ``era`` when ``step`` was taken from the queue; None for the current value.
        """
        run = functools.partial(self._run, step, following, self.era if era is None else era)
        self._host = asyncio.get_running_loop()
        context = contextvars.copy_context()
        self._running = True
        try:
            await self._host.run_in_executor(self._pool, context.run, run)
        finally:
            self._running = False
            self._host.call_soon(self._take_unless_running)
            # In case the next step does not report that it computes.
            self._host.call_later(_LATEST, self.take_outputs)

    def _run(self, first: Step, following: Callable[[], Step | None], era: int) -> None:
        computing.listen(self._computes)
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        step: Step | None = first
        while step is not None:
            self._make_changes()
            with self.idle, torch.inference_mode():  # each thread has its own mode
                if self.era != era:
                    return
                self._steps.run_until_complete(step())
            with self.idle:  # a sleep, which empties the queue, comes before both or after both
                step, era = following(), self.era

    async def between_steps(self, change: Callable[[], _T]) -> _T:
        """Run ``change`` on the steps' thread before its next step, or at once if no step runs. Return its result."""
        done: Future[_T] = Future()
        self._changes.append((change, done))
        self._pool.submit(self._make_changes)
        return await asyncio.wrap_future(done)

    def _make_changes(self) -> None:
        while self._changes:
            change, done = self._changes.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                with self.idle, torch.inference_mode():
                    result = change()
            except Exception as error:  # noqa: BLE001 - the caller of between_steps gets it
                done.set_exception(error)
            else:
                done.set_result(result)

    def _computes(self) -> None:
        if self._host is not None and self._outputs:
            self._host.call_soon_threadsafe(self.take_outputs)

    def _take_unless_running(self) -> None:
        """Hand out the outputs unless a step runs.

        This runs in the engine's loop. If another step is ready, the loop has already started it by then.
        """
        if not self._running:
            self.take_outputs()

    def take_outputs(self) -> None:
        """Run the calls that ``hand_over`` has stored. This runs in the engine's loop."""
        while self._outputs:
            self._outputs.popleft()()

    def hand_over(self, call: Callable[[], None]) -> None:
        """Make the engine's loop run ``call``, because only the loop's own thread may use the loop's asyncio queues."""
        if self._host is None or asyncio.get_running_loop() is self._host:
            self.take_outputs()  # the earlier outputs come first
            call()
        else:
            self._outputs.append(call)

    def end_era(self) -> None:
        """Drop all outputs, and all steps that were taken from the queue but have not run.

        The caller holds the lock ``idle``.
        """
        self.era += 1
        self._outputs.clear()

    def computed_seconds(self) -> int:
        """Return the CPU time that the steps' thread has used, in whole seconds; 0 before its first step."""
        if self._clock is None:
            return 0
        return int(time.clock_gettime(self._clock))

    def close(self) -> None:
        """Wait for the running step, then end the thread."""
        self._pool.shutdown()
        self._steps.close()


def steps_of(agent: Any) -> StepThread | None:
    """Return the StepThread of an agent, which the first call creates; None if the device is asynchronous."""
    if not activation.is_synchronous():
        return None
    steps = getattr(agent, _NAME, None)
    if steps is None:
        steps = StepThread()
        setattr(agent, _NAME, steps)
    return steps


async def _step(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    followed = kwargs.pop(prompt_turns.FOLLOWED, False)
    steps = steps_of(self)
    step: Step = functools.partial(_run_one, original, self, *args, **kwargs)
    if steps is None:
        await step()
        return
    era = steps.era
    second = None
    if followed:
        steps.take_outputs()  # the engine sends the prompts once it has seen the step before
        second = await joined_forward.following(self, _FOLLOWS)
    held: list[dict[str, Any]] = []
    following = functools.partial(_following, original, self, held)
    if second is None:
        await steps.run(prompt_pace.timed(self, step, kwargs.get("inputs"), decodes=False), following, era)
    elif joined_forward.can_join(self, kwargs, second):
        second.pop(prompt_turns.FOLLOWED, None)
        prompts = functools.partial(_run_one, original, self, **second)
        both = functools.partial(joined_forward.joined, self, step, prompts, second)
        await steps.run(prompt_pace.timed(self, both, second.get("inputs"), decodes=True), following, era)
    else:
        await steps.run(prompt_pace.timed(self, step, kwargs.get("inputs"), decodes=False), era=era)
        held.append(second)
    for taken in held:
        if steps.era == era:
            await _step(original, self, **taken)


async def _run_one(original: Original, agent: Any, *args: Any, **kwargs: Any) -> None:
    """Run a step, and forget the sessions that ended before it."""
    forget_before_scoring(agent, kwargs)
    await original(agent, *args, **kwargs)


def _following(original: Original, agent: Any, held: list[dict[str, Any]]) -> Step | None:
    """Take a step from the agent's queue and return it; None if there is none. This runs on the steps' thread.

    The engine's loop reads the same queue, but not now, because it waits for this thread. A step that is to share its
    forward with the step after it must be started by the loop. Such a step is appended to ``held`` instead.
    """
    with contextlib.suppress(asyncio.QueueEmpty):
        ready = joined_forward.received(agent, agent._in_que.get_nowait())
        if not ready.get(prompt_turns.FOLLOWED):
            ready.pop(prompt_turns.FOLLOWED, None)
            step = functools.partial(_run_one, original, agent, **ready)
            return prompt_pace.timed(agent, step, ready.get("inputs"), decodes=False)
        held.append(ready)
    return None


_AGENT = "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent"
_MEANWHILE = "changes weights or caches while a step may still run on dlinfer's step thread"

_async_step = replaces(
    f"{_AGENT}._async_step",
    why="computes in the engine's event loop, which stands still until a step on the host is done",
    signature="(self, inputs, delta=None, swap_in_map=None, swap_out_map=None, sampling_inputs=None, "
    "stopping_criteria=None, return_logits=False, return_routed_experts=False, return_ce_loss=False, "
    "extra_inputs=None, cache_inputs=None, kv_connector_metadata=None)",
)(_step)


@replaces(
    f"{_AGENT}._push_output", why="fills an asyncio queue, which only the event loop's own thread may do"
)
def _push_output(original: Original, self: Any, output: Any) -> None:
    steps = steps_of(self)
    if steps is None:
        original(self, output)
    else:
        steps.hand_over(functools.partial(original, self, output))


@replaces(f"{_AGENT}.wakeup", why=_MEANWHILE)
def _wakeup(original: Original, self: Any, tags: Any = None) -> Any:
    steps = getattr(self, _NAME, None)
    with contextlib.nullcontext() if steps is None else steps.idle:
        return original(self, tags)


@replaces(f"{_AGENT}.sleep", why=_MEANWHILE)
async def _sleep(original: Original, self: Any, level: int = 1) -> None:
    steps = getattr(self, _NAME, None)
    with contextlib.nullcontext() if steps is None else steps.idle:
        if steps is not None:
            steps.end_era()
        texts_of(self).clear()  # all sessions end; a step that was dropped may have said so
        await original(self, level)


@replaces(f"{_AGENT}.release", why=_MEANWHILE)
def _release(original: Original, self: Any) -> None:
    steps = getattr(self, _NAME, None)
    if steps is not None:
        steps.close()
        setattr(self, _NAME, None)
    original(self)


@replaces(
    "lmdeploy.pytorch.engine.engine:Engine.get_local_health_status",
    why="reports an engine as hung if one step takes more than LMDEPLOY_HEALTH_UNHEALTHY_AFTER seconds",
    essential=False,
)
def _health(original: Original, self: Any) -> dict[str, Any]:
    """Count each second of computation as progress of the scheduler, but not the time of a step that hangs."""
    status = original(self)
    steps: StepThread | None = getattr(getattr(self.executor, "model_agent", None), _NAME, None)
    if steps is not None and status["schedule_metrics"] is not None:
        status["schedule_metrics"].scheduler_tick += steps.computed_seconds()
    return status
