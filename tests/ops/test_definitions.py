"""What follows from each op's one definition: documentation, schema, samples, tolerances."""

import json
from pathlib import Path

import pytest
import torch

import dlinfer
from dlinfer import ops
from dlinfer.ops.attention.semantics import window
from tests.ops import cases

REGISTRY = ops.registry()
PUBLIC = [name for name in ops.__all__ if name in REGISTRY]


def test_every_op_is_exported_under_its_name():
    assert set(PUBLIC) == set(REGISTRY)
    assert all(getattr(dlinfer.ops, name) is REGISTRY[name] for name in PUBLIC)


@pytest.mark.parametrize("op", REGISTRY)
def test_documentation_gives_shapes_errors_and_what_is_mutated(op):
    text = REGISTRY[op].__doc__ or ""
    assert "[" in text.split("\n", 1)[1]
    assert "Raises" in text
    assert "mutated" in text
    assert "Returns" in text or "return" in text


@pytest.mark.parametrize("op", REGISTRY)
def test_schema_follows_torchs_rules_for_custom_ops(op):
    schema = REGISTRY[op].overload._schema
    mutated = [argument.name for argument in schema.arguments if argument.is_write]
    assert mutated == list(REGISTRY[op].mutates)
    assert not (mutated and schema.returns)  # a mutating op returns nothing, so never an argument
    assert not any(argument.has_default_value() for argument in schema.arguments)
    assert torch.Tag.pt2_compliant_tag in REGISTRY[op].overload.tags


SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
"""Op -> version -> its schema then. A released version is never changed: artifacts were made for it."""


@pytest.mark.parametrize("op", REGISTRY)
def test_another_schema_is_another_version(op):
    """Give the op ``version=`` one more, and add it with its schema to schemas.json."""
    spec = REGISTRY[op]
    assert spec.schema == SCHEMAS[op][str(spec.version)]
    assert spec.version == len(SCHEMAS[op])


@pytest.mark.parametrize("op", REGISTRY)
def test_samples_are_named_apart_and_repeat(op):
    first, second = (cases.samples(REGISTRY[op], torch.float32) for _ in range(2))
    names = [sample.name for sample in first]
    assert len(set(names)) == len(names) >= 4
    for one, other in zip(first, second, strict=True):
        for given, again in zip(one.args, other.args, strict=True):
            if isinstance(given, torch.dtype):
                assert given is again
            else:
                torch.testing.assert_close(given, again, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", REGISTRY)
def test_every_dtype_has_a_tolerance_with_a_reason(op):
    assert set(REGISTRY[op].tolerances) == set(cases.DTYPES)
    assert all(tolerance.reason for tolerance in REGISTRY[op].tolerances.values())


@pytest.mark.parametrize(
    ("given", "bounds"),
    [(None, (-1, -1)), (-1, (-1, -1)), (0, (-1, -1)), (5, (5, 5)), ((3, 0), (3, 0)), ([-1, 2], (-1, 2))],
)
def test_what_a_sliding_window_means(given, bounds):
    assert window(given) == bounds


def test_repr_and_signature_show_the_op():
    assert repr(ops.silu_and_mul) == "<dlinfer op silu_and_mul(Tensor x) -> Tensor>"
    assert list(ops.linear.signature().parameters) == ["x", "weight", "bias", "all_reduce", "group"]
