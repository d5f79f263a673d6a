"""Sessions of many threads, asynchronous runs, callbacks."""

import sys
import threading

import pytest
import torch

import dlinfer
from dlinfer.errors import ArtifactInputError
from dlinfer.runtime.session.session import Session
from tests.graph.threads import together
from tests.runtime.artifact.artifact_files import (
    Head,
    Keeps,
    Stub,
    compiled_head,
    rows,
    same,
    saved,
    use_stub,
)


@pytest.fixture
def often_switching():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("options", [{}, {"io": "owned"}], ids=["caller", "owned"])
def test_8_threads_with_1000_runs_each(tmp_path, options, often_switching):
    """The real engine: each thread's results are its own, and every run is counted.

    A result in the session's own tensors holds until any thread's next run; in the caller's it stays.
    """
    head, artifact = compiled_head()
    session = dlinfer.load(saved(artifact, tmp_path / "a.dlinfer"), options=options)
    inputs = [rows(1 + number, number) for number in range(8)]
    wanted = [head(x)["logits"] for x in inputs]
    outputs = [torch.empty(1 + number, 4) for number in range(8)]

    def work(number):
        wrong = 0
        for _ in range(1000):
            outputs[number].zero_()
            session.run({"x": inputs[number]}, outputs={"logits": outputs[number]})
            wrong += not torch.allclose(outputs[number], wanted[number], atol=1e-6)
        return wrong

    assert together(8, work) == [0] * 8
    assert session.get_metrics()["num_of_inferences"] == 8000
    same(session.run({"x": inputs[2]})["logits"], wanted[2])


def test_runs_that_write_a_buffer_are_kept_apart(tmp_path, monkeypatch, often_switching):
    """An entry that writes is never run by two threads at once, whatever the engine can."""
    inside, most = [0], [0]

    class Watches(Stub):
        def resolve(self, callee):
            function = super().resolve(callee)

            def watched(*args):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                try:
                    return function(*args)
                finally:
                    inside[0] -= 1

            return watched

    use_stub(monkeypatch, Watches())
    artifact = dlinfer.compile(
        Keeps().eval(), (rows(2), torch.tensor([0, 1])), options={"small_regions": "engine"}
    )
    session = dlinfer.load(saved(artifact, tmp_path / "a.dlinfer"))
    given = {"x": rows(2), "slots": torch.tensor([3, 4])}
    together(4, lambda number: [session.run(given) for _ in range(50)])
    assert most == [1]


def test_threads_that_come_first_set_it_up_once(tmp_path, monkeypatch):
    stub = use_stub(monkeypatch)
    session = dlinfer.load(saved(compiled_head()[1], tmp_path / "a.dlinfer"))
    stub.regions.clear()
    found = together(8, lambda number: session.run({"x": rows(3)}))
    for one in found:
        same(one, Head().eval()(rows(3)))
    assert len(stub.regions) <= 1


def test_no_thread_sees_it_before_its_runs_are_kept_apart(tmp_path, monkeypatch):
    use_stub(monkeypatch)
    session = dlinfer.load(saved(compiled_head()[1], tmp_path / "a.dlinfer"))
    seen, relock = [], Session._relock

    def looked(session, stages):
        seen.append(session.is_set_up)
        relock(session, stages)

    monkeypatch.setattr(Session, "_relock", looked)
    session.setup()
    assert seen == [False]


def test_asynchronous_runs_end_in_the_order_in_which_they_were_asked_for(tmp_path, monkeypatch):
    use_stub(monkeypatch)
    session = dlinfer.load(saved(compiled_head()[1], tmp_path / "a.dlinfer"))
    said = []
    session.set_start_callback(lambda inputs: said.append(("start", len(inputs["x"]))))
    session.set_finish_callback(lambda outputs: said.append(("finish", len(outputs["best"]))))
    futures = [
        session.run_async(
            {"x": rows(count)}, callback=lambda found: said.append(("done", len(found["best"])))
        )
        for count in range(1, 9)
    ]
    session.wait()
    assert all(future.done() for future in futures)
    assert said == [(what, count) for count in range(1, 9) for what in ("start", "finish", "done")]
    for count, future in enumerate(futures, 1):
        same(future.result(), Head().eval()(rows(count)))


def test_an_asynchronous_run_that_fails_is_told_by_its_future_and_by_wait(tmp_path, monkeypatch):
    use_stub(monkeypatch)
    session = dlinfer.load(saved(compiled_head()[1], tmp_path / "a.dlinfer"))
    bad = session.run_async({"x": rows(17)})
    good = session.run_async({"x": rows(3)})
    with pytest.raises(ArtifactInputError):
        session.wait()
    session.wait()  # told once
    assert isinstance(bad.exception(), ArtifactInputError)
    same(good.result(), Head().eval()(rows(3)))
    session.close()


def test_an_asynchronous_run_may_be_cancelled_while_it_waits(tmp_path, monkeypatch):
    use_stub(monkeypatch)
    with dlinfer.load(saved(compiled_head()[1], tmp_path / "a.dlinfer")) as session:
        begun, goes_on = threading.Event(), threading.Event()

        def blocks(found):
            begun.set()
            assert goes_on.wait(500)

        first = session.run_async({"x": rows(3)}, callback=blocks)
        try:
            assert begun.wait(500)
            second = session.run_async({"x": rows(3)})
            assert second.cancel()
            third = session.run_async({"x": rows(4)})
        finally:
            goes_on.set()
        session.wait()
        same(first.result(), Head().eval()(rows(3)))
        same(third.result(), Head().eval()(rows(4)))


def test_a_start_callback_that_raises_keeps_the_run_from_starting(tmp_path, monkeypatch):
    use_stub(monkeypatch)
    session = dlinfer.load(saved(compiled_head()[1], tmp_path / "a.dlinfer"))

    def no(inputs):
        raise PermissionError("not now")

    session.set_start_callback(no)
    with pytest.raises(PermissionError, match="not now"):
        session.run({"x": rows(3)})
    assert session.get_metrics()["num_of_inferences"] == 0
    session.set_start_callback(None)
    same(session.run({"x": rows(3)}), Head().eval()(rows(3)))
