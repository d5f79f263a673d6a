"""Clusters of little work start no threads; how much a call has to do is told by one of its inputs."""

import threading

import pytest
import torch

from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.vendor.cpu.inductor import small_work
from dlinfer.vendor.cpu.inductor.clusters import ClusterCompiler
from dlinfer.vendor.cpu.inductor.small_work import MOST, Measure, by_one_thread, measure_of
from tests.graph.passes.fusion.capturing import captured
from tests.vendor.cpu.inductor.test_clusters import subgraph_of

x = torch.ones(4, 6)


def measured(function, *args, dynamic=True):
    return measure_of(captured(function, *args, dynamic=dynamic).graph_module)


def most(function, *args, dynamic=True):
    measure = measured(function, *args, dynamic=dynamic)
    assert measure is not None
    return measure.most


def tensor_index(function, *args):
    inputs = captured(function, *args, dynamic=True).graph_module.graph.find_nodes(op="placeholder")
    return next(i for i, node in enumerate(inputs) if isinstance(node.meta["val"], torch.Tensor))


def test_work_grows_with_an_input():
    def function(x):
        return (x * 2 + 1).sin()

    assert measured(function, x) == Measure(tensor_index(function, x), MOST // 3)


def test_views_are_no_work():
    assert most(lambda x: x.t().exp(), x) == MOST


def test_what_is_made_larger_counts_as_large():
    assert 0 < most(lambda x: x[:, None] + torch.zeros(1, 100, 1), x) < MOST // 100


def test_work_of_fixed_size_is_little_or_much_once_and_for_all():
    assert most(lambda x: x + 1, x, dynamic=False) > MOST
    assert measured(lambda x: x + 1, torch.ones(MOST + 1), dynamic=False) is None


def test_no_input_tells_a_product_of_sizes():
    assert measured(lambda x, y: x[:, None] * y[None], torch.ones(5), torch.ones(7)) is None


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_call_of_little_work_has_one_thread_and_leaves_the_others_as_they_were(three_threads):
    seen = []

    def run(number, x):
        seen.append(torch.get_num_threads())
        if x.numel() == 1:
            raise ValueError
        return (x,)

    called = by_one_thread(run, Measure(1, 10))
    for size, threads in ((0, 1), (10, 1), (11, 3)):
        given = torch.ones(size)
        assert called(7, given)[0] is given
        assert (seen.pop(), torch.get_num_threads()) == (threads, 3)
    with pytest.raises(ValueError):
        called(7, torch.ones(1))
    assert torch.get_num_threads() == 3


def test_other_threads_keep_theirs(three_threads):
    def run(x):
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        return (x,)

    seen: list[int] = []
    by_one_thread(run, Measure(0, 10))(x[0])
    assert seen == [3]


def test_without_openmp_a_cluster_is_what_it_was(monkeypatch):
    monkeypatch.setattr(small_work, "_set_threads", lambda: None)
    assert by_one_thread(max, Measure(0, 10)) is max


def test_nothing_changes_where_nothing_tells():
    assert by_one_thread(max, None) is max


@pytest.mark.parametrize("rows", [0, 1, 3, 20_000])
def test_results_are_the_same_from_the_compiler_and_from_disk(rows, tmp_path, graph_mode):
    def body(x):
        return (x * 2 + 1).sin()

    store = ArtifactCache(tmp_path, "inductor")
    first = ClusterCompiler()
    cluster = subgraph_of(body, x)
    name, report = first.compile(cluster, store)
    second = ClusterCompiler()
    assert report.origin == "compiled" and second.load(name, store)
    given = torch.randn(rows, 6)
    fakes = [node.meta["val"] for node in cluster.graph_module.graph.find_nodes(op="placeholder")]
    inputs = [given if isinstance(fake, torch.Tensor) else rows for fake in fakes]
    for compiler in (first, second):
        torch.testing.assert_close(compiler.run(name)(*inputs)[0], body(given), rtol=1e-5, atol=1e-6)
    assert first._compiled[name].measure == second._compiled[name].measure is not None
