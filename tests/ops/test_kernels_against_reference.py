"""Every vendor's kernel, on every sample, against the reference in float64, within the op's stated tolerance."""

import pytest

from dlinfer import ops, vendor
from dlinfer.ops.core import fallback
from tests.ops import cases


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.short)
@pytest.mark.parametrize(("op", "name"), cases.names())
@pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
def test_kernel(vendor_name, op, name, dtype):
    vendor.use(vendor_name)
    spec, args = ops.registry()[op], cases.sample(op, name, dtype).args
    want = cases.expected(spec, args)
    returned = spec.overload(*args)
    cases.assert_close(cases.results(spec, args, returned), want, spec.tolerances[dtype])
    assert fallback.counts() == {}  # served natively


@pytest.mark.parametrize("op", ops.registry())
def test_every_op_is_native_on_cpu(op):
    assert ops.kernels.kernel_authors(vendor.get("cpu"))[op] == "cpu"


@pytest.mark.parametrize(("op", "name"), cases.names())
def test_results_are_new_tensors_and_inputs_stay(op, name):
    spec, sample = ops.registry()[op], cases.sample(op, name, cases.DTYPES[0])
    before = cases.widened(sample.args)
    returned = spec.overload(*sample.args)
    fresh = (
        [] if returned is None else cases.results(spec, sample.args, returned)[: -len(spec.mutates) or None]
    )
    inputs = {arg.untyped_storage().data_ptr() for arg in sample.args if isinstance(arg, cases.Tensor)}
    for tensor in fresh:
        assert tensor.numel() == 0 or tensor.untyped_storage().data_ptr() not in inputs
    if not sample.aliased:
        for parameter, arg, was in zip(spec.parameters, sample.args, before, strict=True):
            if isinstance(arg, cases.Tensor) and parameter not in spec.mutates:
                cases.assert_close([arg], [was], ops.Tolerance(0, 0, "not written"))
