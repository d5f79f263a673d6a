"""Tensors of any sizes and types against numpy: copies, views and parts."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from dlinfer.vendor.megengine.lite import LiteLayout, LiteTensor

TYPES = st.sampled_from(["int32", "float32", "uint8", "int8", "int16", "uint16", "float16"])
ARRAYS = TYPES.flatmap(
    lambda name: np_st.arrays(name, np_st.array_shapes(min_dims=1, max_dims=6, max_side=4))
)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Bit by bit: a NaN is one."""
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ARRAYS, st.data())
def test_copies_shares_and_parts(array, data):
    tensor = LiteTensor(LiteLayout(array.shape, array.dtype))
    tensor.set_data_by_copy(array)
    assert same(tensor.to_numpy(), array)
    assert same(tensor.get_data_by_share(), array)
    shared = LiteTensor()
    shared.set_data_by_share(array)
    assert same(shared.to_numpy(), array)
    count = data.draw(st.integers(1, array.ndim))
    start = [data.draw(st.integers(0, size - 1)) for size in array.shape[:count]]
    end = [data.draw(st.integers(low + 1, size)) for low, size in zip(start, array.shape, strict=False)]
    step = [data.draw(st.integers(1, 4)) for _ in start]
    part = tensor.slice(start, end, step)
    expected = np.ascontiguousarray(array[tuple(map(slice, start, end, step))])
    assert same(part.to_numpy(), expected)
    whole = LiteTensor()
    whole.copy_from(part)
    assert same(whole.to_numpy(), expected)
    tensor.reshape([array.size])
    assert same(tensor.to_numpy(), array.reshape(-1))
