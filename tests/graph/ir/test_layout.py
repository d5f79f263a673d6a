"""Where elements lie: what fakes say of it, symbolic sizes too, and what becomes of a result that lies elsewhere."""

import pytest
import torch

from dlinfer.graph.ir.layout import dense_order, is_contiguous, laid_out, same_place
from dlinfer.graph.torch_private.fake_mode import fresh_mode
from dlinfer.graph.torch_private.symbols import new_symbol


def symbolic(low: int = 2, hint: int | None = 5):
    mode = fresh_mode()
    return mode, new_symbol(mode, 0, low, None, hint)


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.empty(2, 3, 4), (0, 1, 2)),
        (torch.empty(2, 3, 4).transpose(0, 1), (1, 0, 2)),
        (torch.empty(2, 3, 4).permute(2, 0, 1), (1, 2, 0)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.empty(4, 1, 3).transpose(0, 1), (0, 1, 2)),  # a size of 1 fits where it is
        (torch.empty(2, 0, 4).transpose(0, 2), (0, 1, 2)),
        (torch.empty(6), (0,)),
        (torch.empty(()), ()),
        (torch.empty(12)[::2], None),
        (torch.empty(3, 1).expand(3, 4), None),
        (torch.empty(5, 6)[:, :4], None),
    ],
)
def test_the_order_of_dimensions_in_memory(tensor, order):
    assert dense_order(tensor) == order
    if order is not None:
        assert laid_out(tensor, order) is tensor
        assert laid_out(tensor, None).is_contiguous()


@pytest.mark.parametrize(("low", "hint"), [(2, 5), (0, None)])
def test_of_symbolic_sizes(low, hint):
    """Nothing is known of a size without an example, and nothing is taken for it."""
    mode, size = symbolic(low, hint)
    with mode:
        value = torch.empty(3, size, 4)
        assert dense_order(value) == (0, 1, 2)
        assert is_contiguous(value)
        assert dense_order(value.transpose(0, 1)) == (1, 0, 2)
        assert dense_order(torch.empty(64, size).t()) == (1, 0)
        assert dense_order(value[:, :, :2]) is None
        assert laid_out(value, (0, 1, 2)) is value
        assert dense_order(laid_out(value, (1, 0, 2))) == (1, 0, 2)
    environment = mode.shape_env
    assert environment is not None
    assert not environment.guards


def test_the_same_place():
    value = torch.empty(4, 6)
    assert same_place(value, value[:])
    for other in (value.t(), value[1:], value[:, :3], value.view(2, 12), value.view(torch.int32)):
        assert not same_place(value, other)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_a_copy_has_the_order_and_the_values(order):
    for tensor in (
        torch.randn(2, 3, 4),
        torch.randn(4, 3, 2).permute(2, 1, 0),
        torch.randn(2, 1, 4).expand(2, 3, 4),
    ):
        made = laid_out(tensor, order)
        assert torch.equal(made, tensor)
        assert dense_order(made) == order
