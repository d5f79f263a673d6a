"""Small models for the tests, made by the builder once and kept in the cache, with what they compute in float64."""

import numpy as np

from dlinfer.vendor.megengine.building import model_of
from dlinfer.vendor.megengine.nodes import NodeList, Value

WEIGHT = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def layer() -> bytes:
    """``result_0 = relu(data @ weight)``: data [4, 8] or any batch, weight [8, 4], an input too."""
    graph = NodeList()
    data = _input(graph, "data", (4, 8), "float32")
    weight = _input(graph, "weight", (8, 4), "float32")
    product = graph.op("matmul", data, weight, like=(4, 4), transpose_b=False)
    graph.outputs.append(graph.op("relu", product, like=(4, 4)).name)
    return model_of(graph)


def held() -> bytes:
    """``result_0 = softmax(data * 2 + later)``, with a constant inside: the model of the weight-sharing tests."""
    graph = NodeList()
    data = _input(graph, "data", (4, 4), "float32")
    hidden = graph.op("later", like=(4, 4), rows=4, columns=4)
    low = graph.op("mul", graph.op("cast", hidden, like=(4, 4), to="float32"), -9.0, like=(4, 4))
    total = graph.op("add", graph.op("mul", data, 2.0, like=(4, 4)), low, like=(4, 4))
    graph.outputs.append(graph.op("softmax", total, like=(4, 4), axis=1).name)
    return model_of(graph)


def two_results() -> bytes:
    """``result_0 = data + 1, result_1 = data * 3``, of [2, 3]."""
    graph = NodeList()
    data = _input(graph, "data", (2, 3), "float32")
    graph.outputs.append(graph.op("add", data, 1.0, like=data).name)
    graph.outputs.append(graph.op("mul", data, 3.0, like=data).name)
    return model_of(graph)


def heavy() -> bytes:
    """Some milliseconds of products of [256, 256] with themselves, kept in range."""
    graph = NodeList()
    value = _input(graph, "data", (256, 256), "float32")
    for _ in range(12):
        value = graph.op("matmul", value, value, like=value, transpose_b=False)
        value = graph.op("tanh", value, like=value)
    graph.outputs.append(value.name)
    return model_of(graph)


def convolution() -> bytes:
    """A convolution of [1, 8, 16, 16] by weights [8, 8, 3, 3], an input too."""
    graph = NodeList()
    data = _input(graph, "data", (1, 8, 16, 16), "float32")
    weight = _input(graph, "weight", (8, 8, 3, 3), "float32")
    result = graph.op(
        "convolution", data, weight, like=(1, 8, 16, 16), stride=[1, 1], padding=[1, 1], dilation=[1, 1]
    )
    graph.outputs.append(result.name)
    return model_of(graph)


def expected_layer(data: np.ndarray, weight: np.ndarray = WEIGHT) -> np.ndarray:
    return np.maximum(data.astype(np.float64) @ weight.astype(np.float64), 0)


def expected_held(data: np.ndarray) -> np.ndarray:
    total = data.astype(np.float64) * 2 - 9.0 * np.triu(np.ones((4, 4)), 1)
    powers = np.exp(total - total.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _input(graph: NodeList, name: str, shape: tuple[int, ...], dtype: str) -> Value:
    import torch

    graph.inputs.append((name, shape, dtype))
    return Value(name, shape, getattr(torch, dtype))
