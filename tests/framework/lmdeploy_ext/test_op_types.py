"""Layers by LMDeploy's OpType, before 0.18: the arguments of its builders as the record that our layers read."""

import inspect
from typing import Any

import pytest

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.contract import records
from dlinfer.framework.lmdeploy_ext.layers import op_types

pytest.importorskip("lmdeploy")


def attention(num_heads: int, head_size: int, scale: float | None = None, causal: bool = True, **kwargs: Any):
    """Parameters as a builder of LMDeploy 0.17 has them."""


def record(*args: Any, **kwargs: Any):
    return op_types.record("PagedAttention", inspect.signature(attention), args, kwargs)


def test_positional_and_named_arguments_become_the_fields_of_the_build_spec():
    made = record(8, head_size=64, scale=0.125)
    assert (made.num_heads, made.head_dim, made.scale, made.causal) == (8, 64, 0.125, True)


def test_what_only_some_callers_give_is_a_field():
    assert record(8, 64, use_flash_mla=True).use_flash_mla is True


def test_a_field_that_no_builder_has_gets_what_its_absence_means():
    made = record(8, 64)
    assert (made.use_flash_mla, made.mla_index_topk, made.block_sparse_size) == (False, None, 1)


def test_a_wrong_argument_is_an_error_of_the_call():
    with pytest.raises(TypeError, match="head_size"):
        record(8)


def test_a_layer_that_the_release_cannot_have_is_refused_by_name():
    with pytest.raises(UnsupportedFeatureError, match=r"NSAIndexFP8.*\n?.*install LMDeploy 0\.18"):
        op_types.builder("NSAIndexFP8", lambda spec: spec)


def test_every_builder_is_in_the_record_of_0_17():
    recorded = records.nearest("0.17.0")
    assert recorded.version == "0.17.0"
    assert set(recorded.specs) == {f"{name}BuildSpec" for name in op_types.BUILDERS}


def test_our_backend_builds_every_op_type_that_has_a_builder():
    from dlinfer.framework.lmdeploy_ext.layers import backend

    assert set(op_types.BUILDERS) <= set(backend._OURS)
