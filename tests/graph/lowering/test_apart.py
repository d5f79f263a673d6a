"""Bools and wider numbers that share memory only at a later call: eager's result, or a refusal by name."""

import pytest
import torch

from dlinfer.graph.lowering.apart import SharedMemoryError, apart_of, check_apart
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.ops.core import fallback
from tests.graph.compiling import StubEngine, compiled, interpreted_engine, use_engine
from tests.graph.passes.fusion.capturing import captured

pytestmark = pytest.mark.usefixtures("graph_mode")


def reads_before_the_write(mask, buffer):
    seen = mask.logical_not() & mask.new_ones(())
    buffer.zero_()
    return seen


def reads_on_both_sides(mask, buffer):
    before = mask.sum()
    buffer.mul_(2)
    return before, mask.sum(), buffer + 1


def writes_the_mask(mask, buffer):
    before = buffer.sum()
    mask.logical_not_()
    return before, buffer.sum()


FUNCTIONS = [reads_before_the_write, reads_on_both_sides, writes_the_mask]


def apart():
    return torch.zeros(8, dtype=torch.bool), torch.ones(2, dtype=torch.int32)


def in_one_arena():
    arena = torch.tensor([1, 257], dtype=torch.int32)
    return arena.view(torch.bool), arena


@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_shared_at_a_later_call_only(function, monkeypatch):
    use_engine(monkeypatch, interpreted_engine(monkeypatch))
    run = compiled(function)
    with torch.no_grad():
        for arguments in (apart, in_one_arena, apart, in_one_arena):
            given, want = arguments(), arguments()
            torch.testing.assert_close(run(*given), function(*want))
            torch.testing.assert_close(given, want)
    assert sum(fallback.counts().values()) == 2  # calls by torch are counted


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_policy_error_refuses_before_anything_is_written(function, monkeypatch):
    use_engine(monkeypatch, StubEngine())
    run = compiled(function, fallback="error")
    with torch.no_grad():
        run(*apart())
        mask, arena = in_one_arena()
        with pytest.raises(SharedMemoryError, match="pass a copy of the bools"):
            run(mask, arena)
    assert arena.tolist() == [1, 257]


def test_shared_at_the_first_call_is_known_to_the_graph(monkeypatch):
    use_engine(monkeypatch, interpreted_engine(monkeypatch))
    for function in FUNCTIONS:
        with torch.no_grad():
            given, want = in_one_arena(), in_one_arena()
            torch.testing.assert_close(compiled(function)(*given), function(*want))
            torch.testing.assert_close(given, want)


def test_only_what_is_written_is_compared():
    def function(mask, read, written, words):
        written.add_(1)
        return torch.where(mask, read, written), words.clone()

    x = torch.ones(4)
    one = captured(function, x > 0, x, x + 1, x.to(torch.uint8))
    names = [node.name for node in one.graph_module.graph.find_nodes(op="placeholder")]
    ((bools, wide),) = apart_of(one.graph_module.graph)
    assert ([names[index] for index in bools], [names[index] for index in wide]) == (
        ["l_mask_"],
        ["l_written_"],
    )
    assert apart_of(captured(lambda mask, x: x * mask, x > 0, x).graph_module.graph) == []


def test_memory_of_other_storages_is_compared_by_its_addresses():
    memory = bytearray(16)
    arena, mask = (torch.frombuffer(memory, dtype=dtype) for dtype in (torch.int32, torch.bool))
    assert mask.untyped_storage()._cdata != arena.untyped_storage()._cdata
    with pytest.raises(SharedMemoryError):
        check_apart([([0], [1])], (mask, arena))
    check_apart([([0], [1])], (mask.clone(), arena))
    check_apart([([0], [1])], (mask[:0].clone(), arena[:0].clone()))


def test_the_disk_keeps_what_is_assumed(monkeypatch, tmp_path):
    engine = StubEngine()
    graphs = []
    use_engine(monkeypatch, engine)
    from dlinfer.graph import backend

    lower = backend.lower
    monkeypatch.setattr(backend, "lower", lambda *args: graphs.append(lower(*args)) or graphs[-1])
    with torch.no_grad():
        compiled(reads_before_the_write)(*apart())
    (graph,) = graphs
    again = CompiledGraph.from_dict(graph.to_dict(), engine, tmp_path)
    assert again.apart == graph.apart != []
    with pytest.raises(SharedMemoryError):
        again(*in_one_arena())
