"""A failing graph raises what eager raises, and says which op it was."""

import pytest
import torch
import torch.nn.functional as F

from dlinfer.errors import GraphRunError
from tests.graph.compiling import compiled

pytestmark = pytest.mark.usefixtures("graph_mode")
table, ids = torch.randn(5, 4), torch.tensor([0, 4])


def looks_up(table, ids):
    return F.embedding(ids, table) * 2 + 1


def indexes(table, ids):
    return table[ids].sin() * 2 + 1


def selects(table, ids):
    return table.index_select(0, ids) * 2 + 1


def copies(table, ids):
    return table.clone().index_copy_(0, ids, table[:2]) * 2 + 1


@pytest.mark.parametrize("function", [looks_up, indexes, selects, copies])
def test_an_index_out_of_range(function, capfd):
    run = compiled(function)
    with torch.no_grad():
        torch.testing.assert_close(run(table, ids), function(table, ids))
        capfd.readouterr()
        with pytest.raises(Exception) as eager:
            function(table, ids + 3)
        with pytest.raises(GraphRunError) as ours:
            run(table, ids + 3)
        torch.testing.assert_close(run(table, ids), function(table, ids))
    assert isinstance(ours.value, eager.type)
    assert f"in {function.__name__}" in ours.value.fields["line"]
    assert "frame #" not in capfd.readouterr().err
