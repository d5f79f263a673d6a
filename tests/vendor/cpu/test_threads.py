"""The team of threads that all C++ kernels share, alone and through a kernel: any callers, forks, faults and ends."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.test_native import needs_compiler
from tests.vendor.cpu.threads.building import LIBRARY, compiled
from tests.vendor.cpu.threads.calls import counted, gets, load

pytestmark = needs_compiler
REPOSITORY = Path(__file__).parents[3]
SLOTS = 8
"""As kMostShared there."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(LIBRARY, tmp_path_factory.mktemp("team") / "team.so", ["-shared", "-fPIC"])


@pytest.fixture
def team(library: Path) -> Iterator[ctypes.CDLL]:
    """The library of threads/library.cpp, for two threads."""
    loaded = load(str(library))
    loaded.set_threads(2)
    yield loaded
    loaded.set_threads(2)


def in_a_process(code: str, library: Path, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter, which has no thread yet, makes of a few lines about ``team``; ends with 0."""
    before = f"""
import ctypes, os, resource, signal, sys, threading, time
from tests.vendor.cpu.threads.calls import counted, gets, load
team = load({str(library)!r})
team.set_threads(4)
def threads():
    return len(os.listdir("/proc/self/task"))
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", before + code], cwd=REPOSITORY, env=environment, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done


# --- ranges


@given(
    begin=st.integers(0, 50),
    size=st.integers(-2, 3000),
    grain=st.integers(-1, 400),
    threads=st.integers(0, 9),
)
def test_each_index_is_done_once(library, begin, size, grain, threads):
    team = load(str(library))
    team.set_threads(threads)
    assert counted(team, begin, begin + size, grain)
    if size > 0:
        assert team.shortest(begin, begin + size, grain) >= min(max(grain, 1), size)


def test_as_many_threads_as_are_asked_for_take_part(team):
    for threads in (1, 5, 2, 3):
        team.set_threads(threads)
        assert gets(team, threads)


def test_a_job_in_a_job_is_done_where_it_is(team):
    team.set_threads(4)
    counts = numpy.zeros(60 * 7, dtype=numpy.int64)
    assert team.nested(60, 7, counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))) == 0
    assert (counts == 1).all()
    assert gets(team, 4)  # and the caller is no inner one any more


# --- callers


def all_at_once(callers: int, call: Callable[[int], bool]) -> list[bool]:
    """What each of some threads says, which begin together."""
    said = [False] * callers
    barrier = threading.Barrier(callers)

    def one(place: int) -> None:
        barrier.wait()
        said[place] = call(place)

    threads = [threading.Thread(target=one, args=[place]) for place in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return said


def test_more_callers_than_the_team_has_places(team):
    team.set_threads(3)
    callers = SLOTS + 4
    said = all_at_once(
        callers, lambda place: all(counted(team, 0, 30 + place + i, 1, 100) for i in range(40))
    )
    assert said == [True] * callers


def test_a_kernel_with_as_many_callers():
    assert native.why_not() is None
    x, weight = torch.randn(3, 512), torch.randn(1024, 512)
    expected = torch.ops.dlinfer_cpu.linear.default(x, weight, None)

    def call(place: int) -> bool:
        torch.set_num_threads(1 + place % 5)  # OpenMP keeps the number for each thread
        return all(
            torch.equal(torch.ops.dlinfer_cpu.linear.default(x, weight, None), expected) for _ in range(50)
        )

    before = torch.get_num_threads()
    try:
        assert all_at_once(SLOTS + 4, call) == [True] * (SLOTS + 4)
    finally:
        torch.set_num_threads(before)


def test_a_kernel_with_threads_lowered_and_raised_between_calls():
    assert native.why_not() is None
    x, weight = torch.randn(2, 512), torch.randn(2048, 512)
    expected = x.double() @ weight.double().mT
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (5, 1, 2, 5, 2, 1, 5):
            torch.set_num_threads(threads)
            results.append(torch.ops.dlinfer_cpu.linear.default(x, weight, None))
    finally:
        torch.set_num_threads(before)
    # A float32 sum of 512 products of about 1: 512 roundings of a number of at most some 100.
    torch.testing.assert_close(results[0].double(), expected, rtol=0, atol=512 * 100 * 2.0**-24)
    assert all(torch.equal(one, results[0]) for one in results)


# --- faults


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("microseconds", [0, 200])
def test_what_a_body_throws_reaches_the_caller(team, threads, microseconds):
    team.set_threads(threads)
    begun = ctypes.c_int64()
    for at in (0, 1, 500, 999, -1):
        for _ in range(10):
            assert team.fails(1000, at, microseconds, ctypes.byref(begun)) == 1
            if at == -1:  # the others are left out, but for those that had begun
                assert 1 <= begun.value <= threads
        assert counted(team, 0, 1000)


def test_more_faults_at_once_than_places(team):
    team.set_threads(3)

    def call(place: int) -> bool:
        begun = ctypes.c_int64()
        return all(team.fails(50, place, 50, ctypes.byref(begun)) == 1 for _ in range(50))

    assert all_at_once(SLOTS + 4, call) == [True] * (SLOTS + 4)
    assert gets(team, 3)  # no place is lost


def test_no_memory_for_threads(library):
    in_a_process(
        """
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = threads()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))  # a thread's stack takes more
for _ in range(20):
    assert counted(team, 0, 100)
assert threads() == before
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert counted(team, 0, 100)
assert threads() == before + 3
""",
        library,
    )


# --- processes


FORK = """
def child(times):
    for _ in range(times):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            good = counted(team, 0, 5000) and gets(team, 4)
            if good and times > 1:
                child(1)  # and a child of it
            os._exit(0 if good else 5)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            os.write(2, b"a child ended with %d" % status)
            os._exit(1)
"""


def test_a_child_of_fork_computes(library):
    in_a_process(
        FORK
        + """
child(2)
assert threads() == 1  # nothing was hired yet in this one
assert counted(team, 0, 5000)
child(2)
assert gets(team, 4)
""",
        library,
    )


def test_a_child_of_fork_while_others_compute(library):
    in_a_process(
        FORK
        + """
stop, right = threading.Event(), []
def work():
    while not stop.is_set():
        right.append(counted(team, 0, 2000))
others = [threading.Thread(target=work) for _ in range(10)]
for one in others: one.start()
child(15)
stop.set()
for one in others: one.join()
assert all(right) and len(right) > 10
assert gets(team, 4)
""",
        library,
        180,
    )


def test_a_child_of_fork_calls_a_kernel():
    code = """
import os, signal, torch
from dlinfer.vendor.cpu import native
assert native.why_not() is None
torch.set_num_threads(3)
x, weight = torch.ones(1, 512), torch.ones(2048, 512)
def right():  # by no more than this kernel: OpenMP, which torch's own use, has no threads in a child
    return set(torch.ops.dlinfer_cpu.linear.default(x, weight, None)[0].tolist()) == {512.0}
def child():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if right() else 5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
child()
assert right()
child()
assert right()
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=120)


def test_helpers_sleep_where_there_is_nothing_to_do(library):
    done = in_a_process(
        """
for _ in range(50):
    assert counted(team, 0, 100)
assert threads() == 4
time.sleep(0.1)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
""",
        library,
    )
    assert float(done.stdout) < 0.02  # of seconds; one thread that looks for work takes 0.5


def test_helpers_wake_after_sleep(team):
    team.set_threads(3)
    for _ in range(5):
        time.sleep(0.01)  # longer than kAwake
        assert gets(team, 3)


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "os._exit(0)"])
@pytest.mark.parametrize("asleep", [False, True])
def test_a_process_ends_with_helpers_alive(library, end, asleep):
    done = in_a_process(
        f"""
assert counted(team, 0, 100) and threads() == 4
{"time.sleep(0.05)" if asleep else ""}
print(time.time(), flush=True)
{end}
""",
        library,
    )
    assert time.time() - float(done.stdout) < 5  # of which most is Python's


def test_a_process_ends_while_a_daemon_computes(library):
    in_a_process(
        """
def work():
    while True: counted(team, 0, 100, 1, 50)
for _ in range(3): threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
""",
        library,
    )


def test_a_closed_library_stays_under_its_threads(library):
    in_a_process(
        """
import _ctypes
assert counted(team, 0, 100) and threads() == 4
_ctypes.dlclose(team._handle)
time.sleep(0.1)
assert threads() == 4
""",
        library,
    )


def test_signals_are_for_the_threads_of_the_program(library):
    in_a_process(
        """
assert counted(team, 0, 100) and threads() == 4
for number in (signal.SIGUSR1, signal.SIGTERM):  # whose default is to end the process
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    os.kill(os.getpid(), number)
    time.sleep(0.05)
    assert number in signal.sigpending()
    assert signal.sigwait([number]) == number
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGUSR1, signal.SIGTERM}
""",
        library,
    )


def test_helpers_flush_what_is_near_zero_where_their_caller_does(team):
    team.set_threads(4)
    try:
        for on in (1, 0, 1, 0):
            team.flush(on)
            for _ in range(5):
                assert team.flushes_as_caller(20) == 1
    finally:
        team.flush(0)


def test_more_threads_than_a_job_has_parts(team):
    team.set_threads(64)
    assert all(counted(team, 0, size) for size in range(70))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL  # the process's own are as they were


# --- memory that is fetched before there is work on it


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 511, 4096, 1 << 19, 1 << 20, 1 << 30])
def test_the_part_behind_the_callers_is_fetched_up_to_a_limit(team, size, threads):
    part = min(size - size // (2 * threads), (threads - 1) * (512 << 10))
    assert team.fetches(size, threads) == -(-part // 512)


def test_each_index_is_done_once_whatever_memory_was_announced(team):
    team.set_threads(4)
    memory = numpy.ones(1 << 20, dtype=numpy.int8)
    announced = [(memory.ctypes.data, memory.nbytes), (None, 0), (4096, 1 << 40), (memory.ctypes.data + 1, 1)]

    def call(caller: int) -> bool:
        team.will_share(*announced[caller])
        return counted(team, 0, 100, microseconds=20)

    for _ in range(50):
        assert all(all_at_once(len(announced), call))
    assert (memory == 1).all()
