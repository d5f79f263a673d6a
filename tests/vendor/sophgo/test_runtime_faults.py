"""What goes wrong in a worker, or is handed to it: a clear error, no crash, no hang, and the next run works."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dlinfer import settings
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.errors import (
    SophgoCallError,
    SophgoModelError,
    SophgoTimeoutError,
    SophgoUnavailableError,
    SophgoWorkerError,
)
from dlinfer.vendor.sophgo.runtime import chips, device
from dlinfer.vendor.sophgo.runtime.child import wire
from dlinfer.vendor.sophgo.sail import Dtype, Failure
from tests.vendor.sophgo.bmodels import oracle
from tests.vendor.sophgo.conftest import numbers, relative
from tests.vendor.sophgo.test_sail_engine import FLOAT16, own_tensors, run
from tests.waiting import SECONDS, state, threads, until


def open_engine(bmodel: Callable[[str], Path], name: str = "bm1684x") -> sail.EngineLLM:
    return sail.EngineLLM(str(bmodel(name)), [0])


def worker_of(engine: sail.EngineLLM):
    return engine._model.devices[0].worker


def next_run_works(bmodel, name: str = "bm1684x") -> None:
    assert relative(*run(open_engine(bmodel, name), "mlp")) < FLOAT16


@contextlib.contextmanager
def while_it_waits(happens: Callable[[], object]) -> Iterator[None]:
    """Let something happen when a call has been sent to a worker, and its answer is waited for."""
    receive = wire.receive

    def waiting(connection):
        happens()
        return receive(connection)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wire, "receive", waiting)
        yield


# --- a worker that ends or hangs


@pytest.mark.parametrize("chip", ["bm1684x", pytest.param("bm1688", marks=pytest.mark.full)])
def test_a_worker_that_is_killed(fresh, bmodel, chip):
    engine = open_engine(bmodel, chip)
    inputs, outputs = own_tensors(engine, "mlp")
    os.kill(worker_of(engine).pid, signal.SIGKILL)
    assert engine.process("mlp", inputs, outputs) == Failure.WORKER
    assert isinstance(engine.last_error, SophgoWorkerError)
    assert "SIGKILL" in str(engine.last_error)
    assert "open the model again" in str(engine.last_error)
    with pytest.raises(SophgoWorkerError, match="SIGKILL"):
        outputs[0].sync_d2s()
    assert engine.get_graph_names() == ["mlp", "head"][: len(engine.get_graph_names())]
    next_run_works(bmodel, chip)


def test_a_worker_that_is_killed_in_the_middle_of_a_run(fresh, bmodel):
    engine = open_engine(bmodel, "bm1688")  # whose worker is not stopped between calls
    inputs, outputs = own_tensors(engine, "mlp")
    pid = worker_of(engine).pid
    os.kill(pid, signal.SIGSTOP)
    with while_it_waits(lambda: os.kill(pid, signal.SIGKILL)):
        assert engine.process("mlp", inputs, outputs) == Failure.WORKER
    next_run_works(bmodel, "bm1688")


@pytest.mark.full
def test_a_worker_that_hangs_is_ended_in_time(fresh, bmodel):
    engine = open_engine(bmodel, "bm1688")  # whose worker is not stopped between calls
    inputs, outputs = own_tensors(engine, "mlp")
    pid = worker_of(engine).pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with settings.override(sophgo_timeout=0.5):
        assert engine.process("mlp", inputs, outputs) == Failure.TIMEOUT
    assert time.monotonic() - started < SECONDS  # and not settings' own, twice that
    assert isinstance(engine.last_error, SophgoTimeoutError)
    assert isinstance(engine.last_error, TimeoutError)
    assert "0.5 seconds" in str(engine.last_error)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(SophgoWorkerError, match="did not answer 'run'"):
        outputs[0].sync_d2s()
    next_run_works(bmodel, "bm1688")


@pytest.mark.full
def test_an_interrupt_ends_the_worker_and_is_raised(fresh, bmodel):
    """Its answer would be taken for that of the next call."""
    engine = open_engine(bmodel, "bm1688")  # whose worker is not stopped between calls
    inputs, outputs = own_tensors(engine, "mlp")
    os.kill(worker_of(engine).pid, signal.SIGSTOP)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            while_it_waits(lambda: signal.raise_signal(signal.SIGALRM)),
        ):
            engine.process("mlp", inputs, outputs)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(SophgoWorkerError, match="interrupted"):
        outputs[0].sync_d2s()
    next_run_works(bmodel, "bm1688")


def test_more_memory_than_the_device_has(fresh, bmodel):
    """The emulator ends its process over it; the reason is what it printed."""
    engine = open_engine(bmodel)
    handle, kept = sail.Handle(0), []
    with pytest.raises(SophgoWorkerError, match="Memory exhausted"):
        for _ in range(16):
            kept.append(sail.Tensor(handle, [2**29], Dtype.BM_FLOAT32, False, True))
    assert engine.get_device_ids() == [0]
    next_run_works(bmodel)


def test_a_forked_process_may_not_use_its_parents_worker(fresh, bmodel):
    engine = open_engine(bmodel)
    inputs, outputs = own_tensors(engine, "mlp")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(SophgoWorkerError):
            worker_of(engine).put(memoryview(b"child"), "write", number=0, offset=0, size=5)
        code = engine.process("mlp", inputs, outputs)
        os.write(writing, f"{code} {engine.last_error}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(child, 0)
    assert text.startswith(f"{int(Failure.WORKER)} ")
    assert "forked" in text
    assert worker_of(engine).shared[:5] != b"child"
    assert engine.process("mlp", inputs, outputs) == 0


# --- bmodels


@pytest.mark.parametrize("keep", [0, 3, 15, 63, 64, 1000, 5_000, 1_000_000, -1])
@pytest.mark.parametrize("form", ["file", "bytes"])
def test_a_bmodel_that_is_not_whole(bmodel, tmp_path, keep, form):
    data = bmodel("bm1684x").read_bytes()[:keep]
    path = tmp_path / "cut.bmodel"
    path.write_bytes(data)
    with pytest.raises(SophgoModelError, match=r"header|its header says"):
        sail.EngineLLM(str(path), [0]) if form == "file" else sail.EngineLLM(data, len(data), [0])


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 8))]
)
def test_a_bmodel_whose_description_was_altered(fresh, bmodel, seed):
    """Numbers of the flatbuffer: BMRuntime crashes over some of them, and must do so alone."""
    data = bytearray(bmodel("bm1684x").read_bytes())
    flat = int.from_bytes(data[8:12], "little")
    random = np.random.RandomState(seed)
    for place in random.randint(64 + 256, 64 + flat - 4, 40):
        data[place : place + 4] = random.bytes(4)
    with settings.override(sophgo_timeout=5):
        try:
            engine = sail.EngineLLM(bytes(data), len(data), [0])
        except (SophgoModelError, SophgoWorkerError, SophgoUnavailableError) as error:
            assert str(error)
        else:
            engine.get_graph_names()
    next_run_works(bmodel)


@pytest.mark.parametrize(
    ("at", "text", "match"),
    [
        (0, b"not a bmodel at all, though it is long enough", "does not start like a bmodel"),
        (64, b"\xff" * 400, "cannot be read"),
    ],
)
def test_a_file_that_is_no_bmodel(bmodel, at, text, match):
    data = bytearray(bmodel("bm1684x").read_bytes())
    data[at : at + len(text)] = text
    with pytest.raises(SophgoModelError, match=match):
        sail.EngineLLM(bytes(data), len(data), [0])


@pytest.mark.parametrize(("name", "chip"), [("bm1684x", "bm1688"), ("bm1688", "bm1684x")])
def test_a_bmodel_of_another_chip(bmodel, open_chips, name, chip):
    with (
        settings.override(sophgo_emulate=chip),
        pytest.raises(SophgoModelError, match=f"compiled for {name}, but device 0 is {chip}"),
    ):
        open_engine(bmodel, name)


@pytest.mark.parametrize("name", [b"BM9999X", b"BM1690\0"])
def test_a_bmodel_of_a_chip_that_the_runtime_does_not_know(fresh, bmodel, monkeypatch, name):
    """bm1690 is compiled for, and has another runtime than libsophon's. Nothing is started for it."""
    monkeypatch.setattr(device, "Worker", None)
    data = bytearray(bmodel("bm1684x").read_bytes())
    at = data.index(b"BM1684X\0")
    data[at - 4 : at + 7] = len(name.rstrip(b"\0")).to_bytes(4, "little") + name
    chip = name.rstrip(b"\0").decode().lower()
    with pytest.raises(
        SophgoUnavailableError, match=f"emulator of {chip} .*there are emulators only of bm1684x, bm1688"
    ):
        sail.EngineLLM(bytes(data), len(data), [0])


def test_a_bmodel_of_more_devices(bmodel, open_chips):
    with pytest.raises(SophgoModelError, match="needs 2 devices, but 1 were passed"):
        open_engine(bmodel, "two devices")


def test_without_a_chip_and_without_a_toolchain(fresh, bmodel, tmp_path):
    path = str(bmodel("bm1684x"))
    with settings.override(cache_dir=str(tmp_path)):
        with pytest.raises(SophgoUnavailableError, match="make toolchains"):
            sail.Handle(0)
        with pytest.raises(SophgoUnavailableError, match="make toolchains"):
            sail.EngineLLM(path, [17])
        found = chips.find(tmp_path)
    assert not found.chips
    assert "no Sophgo device" in found.reason


# --- tensors that do not fit


def bad_tensors(engine):
    """(name, inputs, outputs, match) of what ``process`` refuses."""
    inputs, outputs = own_tensors(engine, "mlp")
    with settings.override(sophgo_emulate=engine._model.chip):
        handle = sail.Handle(0)
        other = sail.Tensor(sail.Handle(1), [1, 8, 16], Dtype.BM_FLOAT16, False, True)

    def tensor(shape, dtype=Dtype.BM_FLOAT16, memory=True):
        with settings.override(sophgo_emulate=engine._model.chip):
            return sail.Tensor(handle, shape, dtype, True, memory)

    return {
        "another type": ({**inputs, 0: tensor([1, 8, 16], Dtype.BM_FLOAT32)}, outputs, "must be BM_FLOAT16, given"),
        "no such stage": (
            {0: tensor([1, 12, 16]), 1: tensor([1, 12, 16])},
            outputs,
            r"takes those of \[1, 8, 16\], \[1, 8, 16\] or \[1, 16, 16\]",
        ),
        "two stages": ({0: tensor([1, 8, 16]), 1: tensor([1, 16, 16])}, outputs, "takes those of"),
        "an input too few": ({0: inputs[0]}, outputs, r"a dict with keys 0 to 1, given \[0\]"),
        "an input too many": ({**inputs, 2: inputs[0]}, outputs, "a dict with keys 0 to 1"),
        "no dict": ([*inputs.values()], outputs, "a dict with keys 0 to 1, given list"),
        "no tensor": ({**inputs, 1: np.zeros(3)}, outputs, "not a sail.Tensor but ndarray"),
        "no device memory": ({**inputs, 1: tensor([1, 8, 16], memory=False)}, outputs, "given a tensor on no device"),
        "another device": ({**inputs, 1: other}, outputs, "must be on device 0, given a tensor on device 1"),
        "an output too small": (inputs, {0: tensor([1, 4, 16])}, "needs 256 bytes, given memory of 128"),
        "an output of another shape": (inputs, {0: tensor([1, 16, 8])}, r"\[1, 8, 16\], given \[1, 16, 8\]"),
        "an output of another stage": (inputs, {0: tensor([1, 16, 16])}, r"must have shape \[1, 8, 16\]"),
        "no output": (inputs, {}, r"outputs must be a dict with keys 0 to 0, given \[\]"),
    }  # fmt: skip


def test_tensors_that_do_not_fit(engine):
    for name, (inputs, outputs, match) in bad_tensors(engine).items():
        assert engine.process("mlp", inputs, outputs) == Failure.ARGUMENT, name
        with pytest.raises(SophgoCallError, match=match):
            raise engine.last_error
    assert relative(*run(engine, "mlp")) < FLOAT16


def test_tensors_of_another_chip(opened):
    """Both are device 0 of an emulator."""
    first, second = opened("bm1684x"), opened("bm1688")
    inputs, outputs = own_tensors(first, "mlp")
    assert second.process("mlp", inputs, outputs) == Failure.ARGUMENT
    said = (
        "input 0 of 'mlp' is a tensor of the emulator of bm1684x, but the model is on the emulator of bm1688"
    )
    assert said in str(second.last_error)


def test_tensors_of_a_worker_that_is_gone(fresh, bmodel):
    before = open_engine(bmodel)
    inputs, outputs = own_tensors(before, "mlp")
    worker_of(before).kill()
    after = open_engine(bmodel)
    others, _ = own_tensors(after, "mlp")
    assert after.process("mlp", {**others, 1: inputs[1]}, outputs) == Failure.ARGUMENT
    assert "input 1 of 'mlp' is a tensor of a worker that has ended" in str(after.last_error)
    assert "create the tensor again" in str(after.last_error)
    assert before.process("mlp", others, outputs) == Failure.WORKER  # its own is gone: that comes first
    assert relative(*run(after, "mlp")) < FLOAT16


def test_a_request_that_cannot_be_sent_costs_no_worker(opened):
    """It was not begun."""
    engine = opened("bm1684x")
    with pytest.raises(TypeError, match="int64"):
        worker_of(engine).call("free", numbers=[np.int64(1)])
    assert relative(*run(engine, "mlp")) < FLOAT16


# --- threads, and what is left behind


def test_threads_share_a_worker(opened):
    engine, errors = opened("bm1684x"), []
    tensors = [own_tensors(engine, "mlp") for _ in range(4)]

    def work(seed: int) -> None:
        try:
            inputs, outputs = tensors[seed]
            for turn in range(3):
                values = numbers(8, seed * 10 + turn)
                for index, value in enumerate(values):
                    inputs[index].update_data(value.astype(np.float16))
                    inputs[index].sync_s2d()
                assert engine.process("mlp", inputs, outputs) == 0
                outputs[0].sync_d2s()
                found = outputs[0].asnumpy().view(np.float16)
                assert relative(found, oracle("mlp", *values)) < FLOAT16
        except BaseException as error:  # noqa: BLE001  a thread's error is raised below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def processor_seconds(pid: int) -> float:
    """What a process has used of the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("chip", ["bm1684x", pytest.param("bm1688", marks=pytest.mark.full)])
@pytest.mark.full
def test_an_idle_worker_takes_no_processor(fresh, bmodel, chip):
    """bm1684x's emulator waits for work in a loop; its worker is stopped between calls."""
    engine = open_engine(bmodel, chip)
    run(engine, "mlp")
    pid = worker_of(engine).pid
    until(lambda: all(state(pid, thread) in "ST" for thread in threads(pid)))  # what it did is over
    before = processor_seconds(pid)
    time.sleep(1)
    assert processor_seconds(pid) - before < 0.1
    assert relative(*run(engine, "mlp")) < FLOAT16
