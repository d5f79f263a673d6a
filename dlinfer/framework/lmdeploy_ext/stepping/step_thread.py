"""Run the model's steps on a thread of their own, so that the engine's event loop goes on during a step.

LMDeploy's loop is written for asynchronous devices: during a step it makes the next inputs and hands out results. On
the host a call returns when its step is done. During a prefill of a few thousand tokens, which takes seconds, nothing
would be streamed, admitted or answered.
"""

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.sampling.steps import texts_of
from dlinfer.framework.lmdeploy_ext.stepping import joined_forward, prompt_pace, prompt_turns
from dlinfer.framework.lmdeploy_ext.stepping.joined_forward import Step
from dlinfer.framework.patching import Original, replaces
from dlinfer.utils import computing

_LATEST = 0.005
"""The most seconds that a step's outputs wait for the next step to begin to compute."""
_FOLLOWS = 0.05
"""The most seconds that decoding waits for the prompts that will follow it: ten times the usual wait."""

_NAME = "dlinfer_steps"
"""Attribute of a model agent: its StepThread."""


class StepThread:
    """Runs the steps of one model agent, coroutines, one after the other on a thread with an event loop of its own.

    idle: a lock that is held while a step runs. Code that changes weights or caches takes this lock first.
    era: counts how often the weights or caches went away. A step of an earlier era never runs.

    A step's outputs are handed over once the next step has begun to compute. The engine's loop needs a millisecond or
    two of Python for them, which would delay the next step if it had not begun. For the same reason the thread itself
    begins a step that lies ready: the loop would have to wake up for it.
    """

    def __init__(self) -> None:
        self.idle = threading.RLock()
        self.era = 0
        self._outputs: deque[Callable[[], None]] = deque()  # the previous step's, which the loop has to take
        self._running = False
        self._steps = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dlinfer-step")
        self._host: asyncio.AbstractEventLoop | None = None
        self._clock: int | None = None

    async def run(
        self, step: Step, following: Callable[[], Step | None] = lambda: None, era: int | None = None
    ) -> None:
        """Run a step, and the steps that lie ready after it, and wait for them without blocking the caller's loop.

        following: returns the next step if one lies ready. The thread calls it after each step.
        era: the era when the step was taken; None for the current era.
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
            with self.idle, torch.inference_mode():  # each thread has its own mode
                if self.era != era:
                    return
                self._steps.run_until_complete(step())
            with self.idle:  # a sleep, which empties the queue, comes before both or after both
                step, era = following(), self.era

    def _computes(self) -> None:
        if self._host is not None and self._outputs:
            self._host.call_soon_threadsafe(self.take_outputs)

    def _take_unless_running(self) -> None:
        """Take outputs unless a step runs. Runs in the loop, which by now has begun the next step if there is one."""
        if not self._running:
            self.take_outputs()

    def take_outputs(self) -> None:
        """Make the calls that were handed over. Runs in the engine's loop."""
        while self._outputs:
            self._outputs.popleft()()

    def hand_over(self, call: Callable[[], None]) -> None:
        """Let the loop that waits for the step make a call: asyncio's queues belong to the thread of their loop."""
        if self._host is None or asyncio.get_running_loop() is self._host:
            self.take_outputs()  # the earlier outputs come first
            call()
        else:
            self._outputs.append(call)

    def end_era(self) -> None:
        """Drop the steps taken so far and their outputs, as nobody waits for them. The caller holds ``idle``."""
        self.era += 1
        self._outputs.clear()

    def computed_seconds(self) -> int:
        """Return the CPU time of the steps' thread in whole seconds; 0 before its first step."""
        if self._clock is None:
            return 0
        return int(time.clock_gettime(self._clock))

    def close(self) -> None:
        """Wait for the step under way and end the thread."""
        self._pool.shutdown()
        self._steps.close()


def _steps_of(agent: Any) -> StepThread | None:
    """Return the StepThread of an agent, made at its first step; None for devices whose calls return at once."""
    if not activation.is_synchronous():
        return None
    steps = getattr(agent, _NAME, None)
    if steps is None:
        steps = StepThread()
        setattr(agent, _NAME, steps)
    return steps


async def _step(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    followed = kwargs.pop(prompt_turns.FOLLOWED, False)
    steps = _steps_of(self)
    step: Step = functools.partial(original, self, *args, **kwargs)
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
        prompts = functools.partial(original, self, **second)
        both = functools.partial(joined_forward.joined, self, step, prompts, second)
        await steps.run(prompt_pace.timed(self, both, second.get("inputs"), decodes=True), following, era)
    else:
        await steps.run(prompt_pace.timed(self, step, kwargs.get("inputs"), decodes=False), era=era)
        held.append(second)
    for taken in held:
        if steps.era == era:
            await _step(original, self, **taken)


def _following(original: Original, agent: Any, held: list[dict[str, Any]]) -> Step | None:
    """Take a step that lies ready from the agent's queue, or return None. Runs on the steps' thread.

    Only the loop reads this queue otherwise, and it waits for the thread meanwhile. held: gets a step that the loop has
    to begin, since it will be joined with another step.
    """
    with contextlib.suppress(asyncio.QueueEmpty):
        ready = joined_forward.received(agent, agent._in_que.get_nowait())
        if not ready.get(prompt_turns.FOLLOWED):
            ready.pop(prompt_turns.FOLLOWED, None)
            step = functools.partial(original, agent, **ready)
            return prompt_pace.timed(agent, step, ready.get("inputs"), decodes=False)
        held.append(ready)
    return None


_AGENT = "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent"
_MEANWHILE = "would change weights or caches under a step on the step's thread"

_async_step = replaces(
    f"{_AGENT}._async_step",
    why="computes in the engine's event loop, which stands still until a step on the host is done",
    signature="(self, inputs, delta=None, swap_in_map=None, swap_out_map=None, sampling_inputs=None, "
    "stopping_criteria=None, return_logits=False, return_routed_experts=False, return_ce_loss=False, "
    "extra_inputs=None, cache_inputs=None, kv_connector_metadata=None)",
)(_step)


@replaces(f"{_AGENT}._push_output", why="fills a queue of asyncio's, which only the loop's own thread may")
def _push_output(original: Original, self: Any, output: Any) -> None:
    steps = _steps_of(self)
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
    why="takes one step of more than LMDEPLOY_HEALTH_UNHEALTHY_AFTER seconds for an engine that hangs",
    essential=False,
)
def _health(original: Original, self: Any) -> dict[str, Any]:
    """Count each second that a step computes as progress of the scheduler. A step that waits for ever makes none."""
    status = original(self)
    steps: StepThread | None = getattr(getattr(self.executor, "model_agent", None), _NAME, None)
    if steps is not None and status["schedule_metrics"] is not None:
        status["schedule_metrics"].scheduler_tick += steps.computed_seconds()
    return status
