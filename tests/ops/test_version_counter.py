"""What an op writes counts in ``tensor._version``: whoever keeps a copy of a tensor compares that."""

import pytest
import torch

from dlinfer import ops
from tests.ops import cases

MUTATING = [name for name, spec in ops.registry().items() if spec.mutates]


@pytest.mark.parametrize("op", MUTATING)
def test_each_written_argument_counts_and_no_other(op):
    spec = ops.registry()[op]
    for sample in cases.samples(spec, torch.float32):
        given = dict(zip(spec.parameters, sample.args, strict=True))
        before = {name: value._version for name, value in given.items() if isinstance(value, torch.Tensor)}
        spec.overload(*sample.args)
        written = {given[name].untyped_storage()._cdata for name in spec.mutates}
        for name, version in before.items():  # attention may write where q lies, which counts for both
            counts = given[name]._version > version
            assert counts == (given[name].untyped_storage()._cdata in written), (sample.name, name)


def test_views_count_for_their_base_and_inference_tensors_are_written_too():
    cache = torch.zeros(2, 2, 4, 1, 8)
    k = torch.randn(2, 1, 8)
    before = cache._version
    torch.ops.dlinfer.fill_kv_cache(k, k, cache[0], cache[1], torch.tensor([0, 5]))
    assert cache._version > before
    with torch.inference_mode():
        made = torch.zeros(2, 2, 4, 1, 8)
        torch.ops.dlinfer.fill_kv_cache(k, k, made[0], made[1], torch.tensor([0, 5]))
        assert torch.equal(made, cache)
        before = cache._version
        torch.ops.dlinfer.fill_kv_cache(k, k, cache[0], cache[1], torch.tensor([0, 5]))
    assert cache._version > before
