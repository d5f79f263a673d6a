"""Ops have no derivative: a call whose gradients are recorded is refused, as graph mode refuses it."""

import pytest
import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.errors import InferenceOnlyError
from tests.ops import cases


def floats_of(args) -> list[Tensor]:
    leaves = [one for arg in args for one in (arg if isinstance(arg, list) else [arg])]
    return [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point() and one.is_leaf]


@pytest.mark.parametrize(
    "op", sorted(ops.registry().keys() - {"embedding_bf12", "embedding_gguf"})
)  # it takes no floats
def test_each_op_refuses_to_be_recorded_and_computes_under_no_grad(op):
    spec = ops.registry()[op]
    made = [one for dtype in (torch.float32, torch.bfloat16) for one in cases.samples(spec, dtype)]
    sample = next(one for one in made if floats_of(one.args))
    first = floats_of(sample.args)[0].requires_grad_(True)
    with pytest.raises(InferenceOnlyError, match=rf"recorded for dlinfer\.ops\.{op}\..*no_grad"):
        spec.overload(*sample.args)
    with torch.no_grad():
        spec.overload(*sample.args)
    first.requires_grad_(False)
    spec.overload(*sample.args)  # nothing is recorded


def test_a_parameter_among_weights_is_seen_and_users_get_the_error_as_it_is():
    x, weight = torch.randn(2, 8), torch.nn.Parameter(torch.ones(8))
    with pytest.raises(InferenceOnlyError):
        ops.rms_norm(x, weight, 1e-6)
    with torch.inference_mode():
        assert not ops.rms_norm(x, weight, 1e-6).requires_grad
    with pytest.raises(InferenceOnlyError):
        ops.linears.overload(x, [torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)], [None, None])
