"""Calls of kernels in C++: which arguments of an op they are not given, and gelu, of which one is a kernel."""

import pytest
import torch
import torch.nn.functional as F

from dlinfer import ops
from dlinfer.ops.core.spec import registry
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor import kernels

TOLD_BY_TENSORS = {
    "block_size",
    "max_kv_seq_len",
    "max_q_seq_len",
    "num_kv_heads",
    "num_q_heads",
    "topk",
}
"""Arguments that say what shapes, lengths and weights say too."""


@pytest.mark.skipif(native.why_not() is not None, reason=f"no kernels in C++: {native.why_not()}")
def test_a_kernel_is_given_what_decides():
    for op, name in kernels._NATIVE.items():
        spec = registry().get(name)
        if not op.startswith("dlinfer::") or spec is None:
            continue
        given = [argument.name for argument in spec.overload._schema.arguments]
        taken = given if (places := kernels.places_of(name)) is None else [given[place] for place in places]
        left = {*given} - {*taken} - TOLD_BY_TENSORS
        assert left == ({"tanh"} if name == "gelu_mul" else set()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tanh", [True, False])
def test_gelu_is_the_one_that_is_asked_for(tanh, dtype):
    gate, up = (torch.randn(64, 96, generator=torch.Generator().manual_seed(i)) for i in range(2))
    gate, up = gate.mul(3).to(dtype), up.to(dtype)

    @torch.compile(backend="dlinfer", fullgraph=True)
    def compiled(gate, up):
        return ops.gelu_mul(gate, up, tanh)

    def exact(tanh: bool) -> torch.Tensor:
        wide = F.gelu(gate.double(), approximate="tanh" if tanh else "none").to(dtype)
        return (wide.double() * up.double()).to(dtype)

    wanted, rtol = exact(tanh), 0.016 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(compiled(gate, up), wanted, rtol=rtol, atol=1e-4)
    with pytest.raises(AssertionError):  # they are told apart
        torch.testing.assert_close(exact(not tanh), wanted, rtol=rtol, atol=1e-4)
