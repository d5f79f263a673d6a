"""What torch has set for a thread, and calls without it."""

import pytest
import torch

from dlinfer.graph.torch_private.thread_state import is_autocast_enabled, run_plain


def test_autocast_and_gradients_are_off_within_and_as_before_afterwards():
    weight = torch.ones(2, 2, requires_grad=True)

    def within(value):
        assert not is_autocast_enabled()
        assert not torch.is_grad_enabled()
        return value @ weight

    assert not is_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_autocast_enabled()
        result = run_plain(within, (torch.ones(2, 2),))
        assert is_autocast_enabled()
    assert torch.is_grad_enabled()
    assert result.dtype is torch.float32
    assert not result.requires_grad


@pytest.mark.parametrize("recorded", [False, True])
def test_an_error_leaves_gradients_as_they_were(recorded):
    with torch.set_grad_enabled(recorded), pytest.raises(ZeroDivisionError):
        run_plain(lambda: 1 // 0, ())
    assert torch.is_grad_enabled()
