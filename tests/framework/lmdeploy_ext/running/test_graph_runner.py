"""When the runner of graphs says that a step computes: the graph itself does, or the runner in its place."""

from dlinfer.framework.lmdeploy_ext.running.graph_runner import CompiledRunner
from dlinfer.utils import computing


def runner() -> CompiledRunner:
    made = object.__new__(CompiledRunner)
    made._silent = set()
    return made


def test_a_graph_that_tells_is_not_told_for() -> None:
    def call(value: int) -> tuple[int, int]:
        computing.begins()
        return value, computing.count()

    one = runner()
    for _ in range(3):
        before = computing.count()
        assert one._run("decoding", call, {"value": 7}) == (7, before + 1)
        assert computing.count() == before + 1


def test_a_graph_that_tells_nothing_is_told_for_before_it_runs_from_its_second_run_on() -> None:
    one, start = runner(), computing.count()
    seen = [one._run("decoding", computing.count, {}) - start for _ in range(3)]
    assert seen == [0, 1, 2]
    assert one._run("prefill", computing.count, {}) - start == 2  # another graph, and its first run
