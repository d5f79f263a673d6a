"""Steps on a thread of their own: the loop goes on, order is kept, errors and ends arrive."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.running import backend
from dlinfer.framework.lmdeploy_ext.stepping import prompt_turns, step_thread
from dlinfer.framework.lmdeploy_ext.stepping.step_thread import StepThread
from dlinfer.utils import computing

SECONDS = 20


class Agent:
    """What patches of a model agent see: steps that block until they are let go, and a queue."""

    def __init__(self) -> None:
        self.begun, self.computes, self.go = threading.Event(), threading.Event(), threading.Event()
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self._in_que: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.seen: list[Any] = []
        self.dist_ctx = SimpleNamespace(rank=0, dist_config=SimpleNamespace(world_size=1))

    def _keep_h2d_transfer(self, transfer: Any) -> None:
        assert transfer is None

    async def step(self, value: Any) -> None:
        self.begun.set()
        while not self.go.wait(0.001):
            if self.computes.is_set():
                self.computes.clear()
                computing.begins()
        await asyncio.sleep(0)
        if isinstance(value, Exception):
            raise value
        self.seen.append((threading.get_ident(), torch.is_inference_mode_enabled()))
        Patched.push(self, value)

    def put(self, value: Any) -> None:
        assert threading.get_ident() == self.loop_thread
        self.queue.put_nowait(value)

    loop_thread = 0


class Patched:
    """The wrappers around the methods above."""

    step: Any = staticmethod(step_thread._async_step.build(Agent.step))
    push: Any = staticmethod(step_thread._push_output.build(Agent.put))


@pytest.fixture
def agent(monkeypatch):
    monkeypatch.setattr(activation, "is_synchronous", lambda: True)
    made = Agent()
    yield made
    if (steps := getattr(made, "dlinfer_steps", None)) is not None:
        made.go.set()
        steps.close()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


def test_the_loop_goes_on_while_a_step_runs(agent):
    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        step = asyncio.create_task(Patched.step(agent, "first"))
        while not agent.begun.is_set():
            await asyncio.sleep(0.001)
        assert not step.done()  # it waits for what only this loop will do
        agent.go.set()
        assert await agent.queue.get() == "first"
        await step
        ((thread, is_inference),) = agent.seen
        assert thread != agent.loop_thread and is_inference

    run(main())


def test_outputs_come_when_a_step_is_over_and_in_order(agent):
    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        agent.go.set()
        for value in range(5):
            await Patched.step(agent, value)
            assert await agent.queue.get() == value
        await Patched.step(agent, 5)
        Patched.push(agent, "from the loop")
        assert [agent.queue.get_nowait(), agent.queue.get_nowait()] == [5, "from the loop"]
        assert len({thread for thread, _ in agent.seen}) == 1

    run(main())


@pytest.mark.parametrize("tells", [True, False])
def test_what_a_step_gave_is_handled_beside_the_next_one(agent, monkeypatch, tells):
    """It waits till that computes; where it does not tell, not for long."""
    monkeypatch.setattr(step_thread, "_LATEST", 10 * SECONDS if tells else 0.02)

    async def engine() -> None:
        await Patched.step(agent, "first")
        agent.go.clear()
        agent.begun.clear()
        await Patched.step(agent, "second")

    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        agent.go.set()
        step = asyncio.create_task(engine())
        while not (agent.seen and agent.begun.is_set()):
            await asyncio.sleep(0.001)
        if tells:
            assert agent.queue.empty()
            agent.computes.set()
        assert await agent.queue.get() == "first"
        assert not step.done()
        agent.go.set()
        await step
        assert await agent.queue.get() == "second"

    run(main())


def test_steps_that_lie_ready_follow_without_the_loop(agent):
    """One that is to be joined to its own follower is begun by the loop, and what comes behind that too."""
    begun: list[Any] = []

    async def step(self: Any, value: Any) -> None:
        begun.append(value)
        await Agent.step(self, value)

    patched = step_thread._async_step.build(step)

    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        first = asyncio.ensure_future(patched(agent, value=0))
        while not agent.begun.is_set():
            await asyncio.sleep(0.001)
        agent._in_que.put_nowait({"value": 1, "_h2d_transfer": None, prompt_turns.FOLLOWED: False})
        agent._in_que.put_nowait({"value": 2})
        agent._in_que.put_nowait({"value": 3, prompt_turns.FOLLOWED: True})
        agent._in_que.put_nowait({"value": 4})
        agent.go.set()
        deadline = time.monotonic() + SECONDS
        while len(agent.seen) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)  # this loop stands still
        assert begun == [0, 1, 2]
        await first
        assert begun == [0, 1, 2, 3, 4]
        assert [await agent.queue.get() for _ in range(5)] == [0, 1, 2, 3, 4]
        assert len({thread for thread, _ in agent.seen}) == 1

    run(main())


def test_an_error_in_a_step_is_the_callers(agent):
    async def main() -> None:
        agent.go.set()
        with pytest.raises(ValueError, match="of the model"):
            await Patched.step(agent, ValueError("of the model"))
        agent.loop_thread = threading.get_ident()
        await Patched.step(agent, "the next")
        assert await agent.queue.get() == "the next"

    run(main())


def test_what_changes_weights_waits_for_the_step(agent):
    order: list[str] = []

    def change(self: Any, tags: Any = None) -> None:
        order.append("changed")

    async def fall_asleep(self: Any, level: int = 1) -> None:
        order.append("asleep")

    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        step = asyncio.create_task(Patched.step(agent, 1))
        while not agent.begun.is_set():
            await asyncio.sleep(0.001)
        threading.Timer(0.05, lambda: (order.append("let go"), agent.go.set())).start()
        step_thread._wakeup.build(change)(agent)
        await step_thread._sleep.build(fall_asleep)(agent)
        await step
        assert order == ["let go", "changed", "asleep"]

    run(main())


class Gap:
    """An RLock that the steps' thread takes, or has released, once the event is set."""

    def __init__(self, lock: Any, before: threading.Event | None, after: threading.Event | None) -> None:
        self._lock, self._before, self._after = lock, before, after

    def __enter__(self) -> None:
        self._wait_for(self._before)
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()
        self._wait_for(self._after)

    @staticmethod
    def _wait_for(event: threading.Event | None) -> None:
        if event is not None and threading.current_thread().name.startswith("dlinfer-step"):
            assert event.wait(SECONDS)


async def empty_the_queue(self: Any, level: int = 1) -> None:
    """As LMDeploy's sleep does."""
    while not self._in_que.empty():
        self._in_que.get_nowait()


@pytest.mark.parametrize("taken", ["by the thread", "for the loop"])
def test_steps_that_were_taken_before_a_sleep_never_run_and_give_nothing(agent, taken):
    """The engine has let go of their sequences: what they gave would be taken for what the next step gives."""
    asleep = threading.Event()

    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        step = asyncio.create_task(Patched.step(agent, value="before"))
        while not agent.begun.is_set():
            await asyncio.sleep(0.001)
        steps = agent.dlinfer_steps
        steps.idle = Gap(steps.idle, None, asleep)  # the thread holds the lock itself, and next takes a step
        agent._in_que.put_nowait({"value": "stale", prompt_turns.FOLLOWED: taken == "for the loop"})
        agent.go.set()
        while not agent._in_que.empty():
            time.sleep(0.001)  # the loop stands still, as one that is about to sleep
        await step_thread._sleep.build(empty_the_queue)(agent)
        asleep.set()
        await step
        await Patched.step(agent, value="after")
        assert await agent.queue.get() == "after"
        assert agent.queue.empty() and len(agent.seen) == 2

    run(main())


def test_a_step_that_comes_behind_a_sleep_runs_though_the_thread_saw_none_of_it(agent):
    """The thread was between the step before the sleep and its look into the queue."""
    awake = threading.Event()

    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        step = asyncio.create_task(Patched.step(agent, value="before"))
        while not agent.begun.is_set():
            await asyncio.sleep(0.001)
        steps = agent.dlinfer_steps
        steps.idle = Gap(steps.idle, awake, None)
        agent.go.set()
        while not agent.seen:
            time.sleep(0.001)
        await step_thread._sleep.build(empty_the_queue)(agent)
        agent._in_que.put_nowait({"value": "after"})
        awake.set()
        await step
        assert await agent.queue.get() == "after"

    run(main())


def test_release_ends_the_thread_and_comes_after_the_step(agent):
    order: list[str] = []

    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        agent.go.set()
        await Patched.step(agent, 1)
        thread = next(one for one in threading.enumerate() if one.name.startswith("dlinfer-step"))
        step_thread._release.build(lambda self: order.append("released"))(agent)
        assert order == ["released"] and not thread.is_alive() and agent.dlinfer_steps is None

    run(main())


def test_a_loop_that_is_gone_does_not_hold_up_the_end(agent):
    """An engine is closed while a step runs: its output has nobody to go to."""

    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        step = asyncio.create_task(Patched.step(agent, 1))
        while not agent.begun.is_set():
            await asyncio.sleep(0.001)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    run(main())
    agent.go.set()
    agent.dlinfer_steps.close()
    assert agent.queue.empty()


def test_devices_that_return_at_once_stay_in_the_loop(agent, monkeypatch):
    monkeypatch.setattr(activation, "is_synchronous", lambda: False)

    async def main() -> None:
        agent.loop_thread = threading.get_ident()
        agent.go.set()
        await Patched.step(agent, 1)
        assert agent.seen[0][0] == agent.loop_thread and not hasattr(agent, "dlinfer_steps")

    run(main())


def test_a_thread_that_never_ran_can_be_closed():
    StepThread().close()


def test_a_model_that_runs_eagerly_tells_that_it_computes():
    class Model(torch.nn.Module):
        ctx_mgr = None

        def forward(self, x: int) -> tuple[int, int]:
            return x, computing.count()

    unused: Any = None
    runner = backend.EagerRunner(Model(), unused, unused, unused, torch.device("cpu"))
    before = computing.count()
    assert runner(x=3) == (3, before + 1)


def test_a_step_that_computes_is_progress_for_health_and_one_that_waits_is_none(agent):
    status = step_thread._health.build(
        lambda engine: {"alive": True, "schedule_metrics": SimpleNamespace(scheduler_tick=7)}
    )
    engine = SimpleNamespace(executor=SimpleNamespace(model_agent=agent))

    def tick() -> int:
        return status(engine)["schedule_metrics"].scheduler_tick

    async def main() -> None:
        assert tick() == 7
        steps = step_thread.steps_of(agent)
        assert steps is not None

        async def compute() -> None:
            while time.thread_time() < 2.1:
                sum(range(1000))

        await steps.run(compute)
        computed = tick()
        assert computed >= 9

        async def wait() -> None:
            await asyncio.sleep(1.1)

        await steps.run(wait)
        assert tick() == computed

    run(main())


def test_an_engine_without_steps_has_lmdeploys_health():
    status = step_thread._health.build(lambda engine: {"alive": False, "schedule_metrics": None})
    assert status(SimpleNamespace(executor=SimpleNamespace())) == {"alive": False, "schedule_metrics": None}
