"""The order in which processes get their tests."""

from types import SimpleNamespace
from typing import Any

from tests.scheduling import FIRST, TOGETHER, ByFile
from tests.workers import ROOT


class Process:
    """Stands in for xdist's side of a process: notes what it is told to run."""

    shutting_down = False

    def __init__(self) -> None:
        self.told: list[int] = []
        self.gateway = SimpleNamespace(id="gw")

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.told += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


def dealt(tests: list[str], processes: int) -> list[list[str]]:
    """What each process is given, where each passes one test after another, in turns."""
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda _: ["popen"] * processes)
    scheduling = ByFile(config)
    nodes: list[Any] = [Process() for _ in range(processes)]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, tests)
    scheduling.schedule()
    done = [0] * processes
    while any(done[i] < len(node.told) for i, node in enumerate(nodes)):
        for i, node in enumerate(nodes):
            if done[i] < len(node.told):
                scheduling.mark_test_complete(node, node.told[done[i]])
                done[i] += 1
    return [[tests[number] for number in node.told] for node in nodes]


def test_what_takes_long_begins_first_and_every_test_runs_once():
    quick = [f"tests/a/test_{number}.py::test_{case}" for number in range(6) for case in range(3)]
    slow = [f"{FIRST[-1]}::test_1", f"{FIRST[2]}::test_1", f"{FIRST[2]}::TestMore::test_2"]
    tests = quick + slow
    found = dealt(tests, 2)
    assert sorted(found[0] + found[1]) == sorted(tests)
    assert found[0][:2] == slow[1:]  # a file as a whole
    assert found[1][0] == slow[0]


def test_tests_of_such_a_folder_run_in_one_process():
    tests = [f"{TOGETHER[0]}{file}.py::test" for file in ("test_a", "deeper/test_b", "test_c")]
    others = [f"tests/a/test_{number}.py::test" for number in range(4)]
    found = dealt([*others[:2], tests[0], *others[2:], *tests[1:]], 2)
    assert found[0][:3] == tests
    assert not set(tests) & set(found[1])


def test_what_begins_first_is_there():
    assert [one for one in FIRST if not (ROOT / one).exists()] == []


def test_a_process_that_crashes_leaves_its_tests_to_others():
    tests = [f"tests/a/test_{file}.py::test_{case}" for file in range(8) for case in range(2)]
    config: Any = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=False), getvalue=lambda _: ["popen"] * 2
    )
    scheduling = ByFile(config)
    nodes: list[Any] = [Process(), Process()]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, tests)
    scheduling.schedule()
    crashing, other = nodes
    done = crashing.told[:3]  # a file, and half of the next
    for number in done[:2]:
        scheduling.mark_test_complete(crashing, number)
    assert scheduling.remove_node(crashing) == tests[done[2]]
    count = 0
    while count < len(other.told):
        scheduling.mark_test_complete(other, other.told[count])
        count += 1
    assert sorted(done + other.told) == list(range(len(tests)))
    assert not scheduling.has_pending
