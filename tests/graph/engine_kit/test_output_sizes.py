"""Sizes of results from a call's inputs: what they are for every call, stored as data, and nothing else is run."""

import json

import pytest
import torch

from dlinfer.graph.engine_kit.output_sizes import UnknownSizeError, reader, sizes_of
from tests.graph.symbols import symbolic


def view(x, y):
    return [x.reshape(-1), torch.cat([x, y]), x[:, ::2], x.unsqueeze(1).expand(-1, 4, -1)]


def parts(x, y):
    return [x[:, 2:], x[: y.shape[0]], x.repeat(2, 3), torch.empty(0), x.sum()]


@pytest.mark.parametrize("function", [view, parts])
def test_sizes_follow_from_inputs(function):
    fakes = symbolic(torch.empty(5, 7), torch.empty(3, 7))
    stored = json.loads(json.dumps(sizes_of([one.shape for one in function(*fakes)], fakes)))
    for rows in (3, 6, 9):
        inputs = [torch.empty(rows + 4, 9), torch.empty(rows, 9)]
        assert reader(stored)(inputs) == tuple(tuple(one.shape) for one in function(*inputs))


def test_numbers_are_inputs_too():
    x, n = symbolic(torch.empty(5, 7), 3)
    (row,) = sizes_of([(n * 2, x.shape[1] // 2)], [x, n])
    assert reader([row])([torch.empty(4, 11), 6]) == ((12, 5),)


def test_a_size_by_a_factor_is_cut_to_a_whole_number():
    def scaled(x):
        return [torch.sym_int(x.shape[0] * 2.5), torch.sym_int(x.shape[1] * 0.3)]

    fakes = symbolic(torch.empty(5, 7))
    stored = json.loads(json.dumps(sizes_of([scaled(*fakes)], fakes)))
    for height in (5, 6, 11):
        image = torch.empty(height, 13)
        assert reader(stored)([image]) == (tuple(scaled(image)),)


def test_a_size_that_no_input_shows_is_refused():
    x, y = symbolic(torch.empty(5, 7), torch.empty(3, 7))
    with pytest.raises(UnknownSizeError):
        sizes_of([torch.cat([x, y]).shape], [x])


@pytest.mark.parametrize(
    "size",
    [True, "inputs", [], "i0", "i0d", "n", "i0d1.real", "n(1)", "__import__('os')", "i0d1 +", "i0d1 1", {"add": 1},
     None, 1.5, "1.5", "i0d1 + 1.5", "trunc(x)", "trunc(1e999)", "lambda", "if", "i0d1 if n1 else 2"],
)  # fmt: skip
def test_what_is_no_size_is_refused_and_never_run(size):
    with pytest.raises(ValueError, match="is not a size"):
        reader([[size]])
