"""Small ONNX models, built on the spot."""

from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, save_model


def saved(graph, path: Path) -> Path:
    model: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save_model(model, path)
    return path


def weight(rows: int = 8, columns: int = 4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


def linear(path: Path, batch: int | str = "batch", rows: int = 8, columns: int = 4) -> Path:
    """output = relu(data @ weight): float32 [batch, rows] -> [batch, columns]."""
    nodes = [
        helper.make_node("MatMul", ["data", "weight"], ["product"]),
        helper.make_node("Relu", ["product"], ["output"]),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("data", TensorProto.FLOAT, [batch, rows])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [batch, columns])],
        [numpy_helper.from_array(weight(rows, columns), "weight")],
    )
    return saved(graph, path)


def oracle(data: np.ndarray) -> np.ndarray:
    """``linear`` in float64."""
    rows, columns = data.shape[1], 4
    return np.maximum(data.astype(np.float64) @ weight(rows, columns).astype(np.float64), 0)


def embedding(path: Path) -> Path:
    """embedded = table[tokens], masked = tokens * mask: two inputs that share a symbol, two outputs, int64."""
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["embedded"]),
        helper.make_node("Mul", ["tokens", "mask"], ["masked"]),
    ]
    tokens = ["batch", "length"]
    graph = helper.make_graph(
        nodes,
        "embedding",
        [helper.make_tensor_value_info(name, TensorProto.INT64, tokens) for name in ("tokens", "mask")],
        [
            helper.make_tensor_value_info("embedded", TensorProto.FLOAT, [*tokens, 4]),
            helper.make_tensor_value_info("masked", TensorProto.INT64, tokens),
        ],
        [numpy_helper.from_array(weight(), "table")],
    )
    return saved(graph, path)


def of_type(path: Path, kind: int, shape: list[int | str]) -> Path:
    """output = data, of any type."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["data"], ["output"])],
        "identity",
        [helper.make_tensor_value_info("data", kind, shape)],
        [helper.make_tensor_value_info("output", kind, shape)],
    )
    return saved(graph, path)
