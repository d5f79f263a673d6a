"""Batches filled sample by sample: the examples of MegEngine Lite's documents, and what does not fit."""

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
import torch

import dlinfer
from dlinfer.errors import BatchCollectorError
from dlinfer.runtime.session.batch_collector import BatchCollector
from tests.runtime.artifact.artifact_files import Head, compiled_head, rows, same, saved, use_stub


def test_in_order_freed_and_in_order_again():
    """Example 1."""
    collector = BatchCollector([4, 8, 8], torch.int32)
    array = np.ones([8, 8], "int32")
    for _ in range(2):
        assert [collector.collect(array * (sample + 1)) for sample in range(4)] == [0, 1, 2, 3]
        collector.free(range(4))
        array += 4
    assert (collector.to_numpy() == np.arange(1, 5, dtype="int32")[:, None, None] * 5).all()


def test_by_id_in_any_order():
    """Example 2."""
    collector = BatchCollector([4, 8, 8], torch.int32)
    for batch_id in (1, 0, 2, 3):
        collector.collect_id(torch.full((8, 8), batch_id + 1, dtype=torch.int32), batch_id)
    assert collector.free_ids == []
    collector.collect_id(np.full((8, 8), 9, dtype="int32"), 2)
    assert collector.get()[:, 3, 3].tolist() == [1, 2, 9, 4]


def test_from_a_pointer_into_the_first_free_place():
    collector = BatchCollector([3, 4], torch.float32)
    collector.collect_id(torch.zeros(4), 0)
    array = np.arange(4, dtype="float32")
    assert collector.collect_by_ctypes(array.ctypes.data_as(ctypes.c_void_p), array.nbytes) == 1
    array += 1
    assert collector.get()[1].tolist() == [0, 1, 2, 3]
    for length in (0, 12, 20):
        with pytest.raises(BatchCollectorError, match="16"):
            collector.collect_by_ctypes(array.ctypes.data_as(ctypes.c_void_p), length)
    with pytest.raises(BatchCollectorError, match="None"):
        collector.collect_by_ctypes(ctypes.c_void_p(), 16)
    assert collector.free_ids == [2]


def test_on_a_tensor_of_the_callers():
    """Example 3."""
    tensor = torch.zeros(4, 6, 8, dtype=torch.int32)
    collector = BatchCollector([4, 6, 8], tensor=tensor)
    collector.collect(np.ones([6, 8], "int32"))
    assert collector.get() is tensor
    assert tensor.sum() == 48


def test_what_is_collected_is_what_a_session_reads(tmp_path, monkeypatch):
    """No second copy: the batch is the session's own input."""
    use_stub(monkeypatch)
    path = saved(compiled_head()[1], tmp_path / "a.dlinfer")
    with dlinfer.load(path, options={"io": "owned"}) as session:
        x = session.get_input_tensor("forward", 0)
        collector = BatchCollector([16, 8], tensor=x)
        for sample in rows(16):
            collector.collect(sample.numpy())
        same(session.run({"x": collector.get()}), Head().eval()(rows(16)))


def test_strided_reversed_and_read_only_samples():
    collector = BatchCollector([4, 3], torch.float32)
    array = np.arange(6, dtype="float32")
    collector.collect(array[::2])
    collector.collect(array[:3][::-1])
    array.flags.writeable = False
    collector.collect(array[:3])
    collector.collect(torch.arange(6.0)[::2])
    assert collector.get().tolist() == [[0, 2, 4], [2, 1, 0], [0, 1, 2], [0, 2, 4]]


@pytest.mark.parametrize(
    "sample",
    [
        np.zeros(4, "float32"),
        np.zeros((1, 3), "float32"),
        np.zeros(3, "float64"),
        torch.zeros(3, dtype=torch.bfloat16),
        np.array(["a", "b", "c"]),
        [0.0, 0.0, 0.0],
        None,
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_samples_that_do_not_fit_take_no_place(sample):
    collector = BatchCollector([2, 3], torch.float32)
    for collect in (collector.collect, lambda one: collector.collect_id(one, 1)):
        with pytest.raises(BatchCollectorError, match="sample"):
            collect(sample)
    assert collector.free_ids == [0, 1]


def test_no_place_is_free():
    collector = BatchCollector([2, 3], torch.float32)
    for _ in range(2):
        collector.collect(torch.zeros(3))
    with pytest.raises(BatchCollectorError, match="all samples are taken"):
        collector.collect(torch.zeros(3))
    wrongs: list[Any] = [2, -1, "0", True]
    for wrong in wrongs:
        with pytest.raises(BatchCollectorError, match="no sample"):
            collector.free([0, wrong])
        with pytest.raises(BatchCollectorError, match="no sample"):
            collector.collect_id(torch.zeros(3), wrong)
    assert collector.free_ids == []


@pytest.mark.parametrize("shape", [[], [2.0], [-1, 3], ["2"]])
def test_an_invalid_shape_is_refused(shape):
    with pytest.raises(BatchCollectorError, match="whole numbers"):
        BatchCollector(shape)


@pytest.mark.parametrize("tensor", [torch.zeros(3, 2), torch.zeros(2, 6)[:, ::2]])
def test_tensors_that_cannot_be_filled(tensor):
    with pytest.raises(BatchCollectorError, match="to fill"):
        BatchCollector([2, 3], tensor=tensor)


def test_bfloat16_has_no_array():
    collector = BatchCollector([1, 2], torch.bfloat16)
    collector.collect(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(BatchCollectorError, match="bfloat16"):
        collector.to_numpy()


def test_threads_never_share_a_place():
    collector = BatchCollector([400, 2], torch.int64)
    start = threading.Barrier(8)

    def work(number):
        start.wait()
        for turn in range(50):
            collector.collect(torch.tensor([number, turn]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(tuple, collector.get().tolist())) == [(n, turn) for n in range(8) for turn in range(50)]


def test_a_sample_in_another_order_of_bytes_is_refused():
    collector = BatchCollector((2, 3), torch.float32)
    with pytest.raises(BatchCollectorError, match=">f4"):
        collector.collect(np.zeros(3, ">f4"))
    assert collector.free_ids == [0, 1]
