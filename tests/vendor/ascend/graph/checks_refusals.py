"""What is left to the kernels: nodes by name while a graph is made, and calls that a graph is not right for."""

import pytest
import torch
from torch import nn

from dlinfer import settings
from dlinfer.errors import GraphFallbackError, OpArgumentError
from dlinfer.graph.engine import find_engine
from dlinfer.ops.core import fallback
from tests.vendor import test_quantised_caches as quantised
from tests.vendor.ascend.graph import compiling, models
from tests.vendor.regions import refused_by, region_of

HALF = torch.float16


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    compiling.texts()
    fallback.reset()


def refused(model, inputs) -> str:
    with pytest.raises(GraphFallbackError) as caught, torch.no_grad():
        compiling.compiled(model, (), inputs)(*inputs)
    return str(caught.value)


def by_torch(model, inputs) -> list[str]:
    """Run a model of which a part, or a call, is left to torch; gives the reasons of calls. The numbers are right."""
    run = torch.compile(model, backend="dlinfer", options={"engine": "ascend", "fallback": "allow"})
    wanted, written = compiling.reference(model, inputs)
    fallback.reset()
    with torch.no_grad(), settings.override(fallback="allow"):
        found = run(*inputs)
    for one, other in zip((found, *inputs), (wanted, *written), strict=True):
        compiling.close(one, other, HALF)
    return [kind.reason for kind in fallback.counts()]


def two_prompts() -> list[torch.Tensor]:
    x, cos, sin, slots, table, *_, keys, values = models.prompt(6, 0, HALF)
    return [x, cos, sin, slots, table.expand(2, -1), torch.tensor([2, 6]), torch.tensor([2, 4]), keys, values]


def test_several_prompts_are_left_to_the_kernel_and_the_rest_is_in_graphs():
    model = models.Prompt(paged=False).half()
    assert "a graph runs only one prompt" in refused(model, two_prompts())
    by_torch(model, two_prompts())
    first, second = compiling.texts()
    assert "ScatterPaKvCache" in first and "FusedInferAttentionScore" not in first + second
    assert "MatMul" in second


def test_an_op_without_a_lowering():
    class Rotated(nn.Module):
        def forward(self, x, cos, sin):
            return torch.ops.dlinfer.apply_rotary_pos_emb_interleaved(x, cos, sin, False)

    x, cos, sin = torch.randn(3, 2, 64).half(), torch.rand(3, 1, 64).half(), torch.rand(3, 1, 64).half()
    assert "the engine has no lowering for this op" in refused(Rotated(), [x, cos, sin])


def test_an_op_of_torch_without_a_converter():
    class Rolled(nn.Module):
        def forward(self, x):
            return torch.special.i0(x)

    assert "torchair cannot convert aten.special_i0" in refused(Rolled(), [torch.randn(3, 4)])


def test_a_dtype_that_the_kernel_refuses():
    class Gated(nn.Module):
        def forward(self, x):
            return torch.ops.dlinfer.silu_and_mul(x)

    assert "are supported, not float64" in refused(Gated(), [torch.randn(3, 4).double()])


def test_quantised_caches():
    region = region_of(quantised.step(8), quantised.arguments(8), lambda index, size: False)
    reasons = refused_by(find_engine("ascend", "cpu"), region)
    assert all(reasons[op] for op in quantised.OPS)


def test_padding_among_the_slots_is_a_call_for_the_kernels():
    model, inputs = models.Decoder(1).half(), models.inputs(1, [5, 0, 9])
    assert by_torch(model, inputs) == []
    inputs = models.inputs(1, [5, 0, 9])
    inputs[3][1] = -1
    (reason,) = by_torch(model, inputs)
    assert reason.startswith("some slots are negative (padding)")


def test_a_slot_behind_the_end_is_an_error_before_anything_is_written():
    model, inputs = models.Decoder(1).half(), models.inputs(1, [5, 9])
    before = inputs[6].clone()
    inputs[3][1] = 9 * models.BLOCK
    with torch.no_grad(), pytest.raises(OpArgumentError, match="kv_start_indices"):
        compiling.compiled(model, (), inputs)(*inputs)
    assert torch.equal(inputs[6].nan_to_num(), before.nan_to_num())


def test_caches_of_one_memory_are_written_where_they_lie():
    model, inputs = models.Decoder(1).half(), models.inputs(1, [5, 9, 130])
    inputs[6:] = torch.stack(inputs[6:]).unbind()
    wanted, written = compiling.reference(model, inputs)
    addresses = [cache.data_ptr() for cache in inputs[6:]]
    with torch.no_grad():
        compiling.close(compiling.compiled(model, (), inputs)(*inputs), wanted, HALF)
    for cache, other in zip(inputs[6:], written[6:], strict=True):
        compiling.close(cache, other, HALF)
    assert [cache.data_ptr() for cache in inputs[6:]] == addresses


def test_the_engine_has_no_options_yet():
    with pytest.raises(Exception, match="it has no options"):
        find_engine("ascend", "cpu").check_options({"mode": "max-autotune"})
