"""Twins of ops that write: one of each, whoever asks for it first."""

import pytest
import torch

from dlinfer.graph.functional import functional_ops as variants
from dlinfer.graph.functional.functional_ops import functional_op
from tests.graph.threads import together


@torch.library.custom_op("dlinfer_test::writes_for_twins", mutates_args=("x",))
def writes(x: torch.Tensor) -> None:
    x.add_(1)


def test_threads_that_come_first_make_one_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses an op that is defined twice."""
    define, made = variants._define, []

    def once(op):
        made.append(op)
        return define(op)

    monkeypatch.setattr(variants, "_define", once)
    twins = together(8, lambda number: functional_op(torch.ops.dlinfer_test.writes_for_twins.default))
    assert len(made) == 1
    assert set(twins) == {twins[0]}
    x = torch.zeros(3)
    assert torch.equal(twins[0](x), torch.ones(3))
    assert torch.equal(x, torch.zeros(3))
