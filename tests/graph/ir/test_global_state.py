"""What a graph needs of torch's settings for the process."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dlinfer.errors import TorchStateChangedError
from dlinfer.graph.capture.trace import trace
from dlinfer.graph.ir.global_state import (
    Requirement,
    dtype_named,
    explicit_dtypes,
    reads_default_dtype,
)
from dlinfer.graph.torch_private.fake_mode import fresh_mode


def graph_of(function, *examples):
    mode = fresh_mode()
    return trace(function, [mode.from_tensor(one) for one in examples], mode).graph_module.graph


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic(fills):
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = fills
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = before


def check(requirement):
    assert requirement.run(lambda number: number + 1, (1,)) == 2


FLOATS, INTS = torch.ones(3), torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "example", "reads"),
    [
        (lambda x: x + torch.rand(3), FLOATS, True),
        (lambda x: x / 2, INTS, True),
        (lambda x: x * 2.5, INTS, True),
        (lambda x: x.sqrt(), INTS, True),
        (lambda x: x * 2, INTS, False),
        (lambda x: x * 2.5 + x.sum(), FLOATS, False),
        (lambda x: x.float() / 2, INTS, False),
        (lambda x: x + torch.rand(3, dtype=torch.float64), FLOATS, False),
    ],
)
def test_which_graphs_read_the_default_dtype(function, example, reads):
    assert reads_default_dtype(graph_of(function, example)) is reads


def test_factories_name_their_dtype_and_read_the_default_no_more():
    graph = graph_of(lambda x: x + torch.rand(3) + torch.arange(0.0, 3.0) + torch.zeros(3), FLOATS)
    explicit_dtypes(graph)
    assert not reads_default_dtype(graph)
    explicit = [node.kwargs.get("dtype") for node in graph.nodes if not node.all_input_nodes and node.args]
    assert explicit == [torch.float32] * 3


def test_another_default_dtype_is_refused_where_the_graph_reads_it():
    reading, other = (Requirement.of(graph_of(one, INTS)) for one in (lambda x: x / 2, lambda x: x * 2))
    check(reading)
    with default_dtype(torch.float64):
        check(other)
        with pytest.raises(
            TorchStateChangedError,
            match=r"default dtype = torch\.float32, but the default dtype = torch\.float64",
        ):
            check(reading)


def test_deterministic_algorithms_are_refused_where_the_graph_was_compiled_without():
    loose = Requirement.of(graph_of(lambda x: x * 2, INTS))
    with deterministic(fills=False):
        strict = Requirement.of(graph_of(lambda x: x * 2, INTS))
        check(strict)
        with pytest.raises(
            TorchStateChangedError, match="deterministic algorithms = off, but deterministic algorithms = on"
        ):
            check(loose)
    check(strict)  # it is deterministic, whether or not that is asked for
    with deterministic(fills=True), pytest.raises(TorchStateChangedError, match="fill_uninitialized_memory"):
        check(strict)


def test_a_requirement_survives_json():
    one = Requirement.of(graph_of(lambda x: x / 2, INTS))
    again = Requirement.from_dict(one.to_dict())
    assert (again.state, again.reads_default_dtype) == (one.state, True)
    with pytest.raises(ValueError, match="not a dtype"):
        dtype_named("torch.nn")
