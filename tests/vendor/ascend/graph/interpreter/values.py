"""Attributes and dtypes of a graph's message as Python's and torch's."""

from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "DT_FLOAT": torch.float32,
    "DT_FLOAT16": torch.float16,
    "DT_BF16": torch.bfloat16,
    "DT_DOUBLE": torch.float64,
    "DT_INT8": torch.int8,
    "DT_UINT8": torch.uint8,
    "DT_INT32": torch.int32,
    "DT_INT64": torch.int64,
    "DT_UINT64": torch.uint64,
    "DT_BOOL": torch.bool,
}
GE_DTYPES = {0: "DT_FLOAT", 1: "DT_FLOAT16", 2: "DT_INT8", 3: "DT_INT32", 4: "DT_UINT8", 9: "DT_INT64"}
GE_DTYPES |= {10: "DT_UINT64", 11: "DT_DOUBLE", 12: "DT_BOOL", 27: "DT_BF16"}
"""GE's own numbers of dtypes (graph/types.h), which attributes have; those of the message's descriptions differ."""


def dtype_of(desc: Any) -> torch.dtype:
    """The dtype of a tensor's description."""
    names = desc.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number
    return DTYPES[names[desc.dtype].name]


def ge_dtype(number: int) -> torch.dtype:
    """The dtype that an attribute means."""
    return DTYPES[GE_DTYPES[number]]


def attribute_of(attribute: Any) -> Any:
    """An attribute's value; a dtype as torch's, a constant as a tensor."""
    kind = attribute.WhichOneof("value")
    value = getattr(attribute, kind)
    if kind == "s":
        return value.decode()
    if kind == "list":
        return [*(one.decode() for one in value.s), *value.i, *value.f, *value.b, *value.dt]
    if kind == "t":
        return constant(value)
    return value


def constant(tensor: Any) -> Tensor:
    """A constant of the graph."""
    data = torch.frombuffer(bytearray(tensor.data), dtype=dtype_of(tensor.desc))
    return data.reshape(list(tensor.desc.shape.dim))
