"""Weights of 4 bits: what the compiler makes of them, and that nothing but that is between a model and its bmodel.

The compiler writes a column of 64 weights as one of 16 levels each, evenly spaced from their least to their largest
(``four_bits``). A chip's results are those of a model with such weights, as near as float16 is.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlinfer.vendor.sophgo.compiler.compile import compile_onnx
from dlinfer.vendor.sophgo.compiler.options import BmodelOptions
from dlinfer.vendor.sophgo.engine.net import Net
from dlinfer.vendor.sophgo.llm import folder as hf
from dlinfer.vendor.sophgo.llm import generate, layout, parts
from tests.vendor.sophgo import llms
from tests.vendor.sophgo.conftest import relative

GROUP = 64
HALF = 5e-3
"""Relative L2 distance of float16's logits from float32's; single products are ten times nearer."""


def four_bits(weight: np.ndarray) -> np.ndarray:
    """A matrix [inputs, outputs] with 16 levels in each column of 64; 0 is one of them."""
    inputs, outputs = weight.shape
    groups = weight.reshape(inputs // GROUP, GROUP, outputs)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    step = (high - low) / 15
    zero = np.round(-low / step)
    levels = np.clip(np.round(groups / step) + zero, 0, 15)
    return ((levels - zero) * step).reshape(inputs, outputs).astype(np.float32)


def with_four_bits(model: nn.Module) -> None:
    """The model's matrices with such weights, in place; the embedding's table is looked up, and stays."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = torch.tensor(four_bits(module.weight.data.T.contiguous().numpy()).T.copy())


def test_a_product_has_sixteen_levels_in_each_group(toolchain):
    """The unit matrix times the weights is the weights as the chip has them. Two groups a column."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = np.random.RandomState(0).randn(2 * GROUP, 32).astype(np.float32) * 0.15
    sizes = {"x": [1, len(weight), len(weight)], "y": [1, *weight.shape]}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items()]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node], "product", values[:1], values[1:], [numpy_helper.from_array(weight, "w")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    made = compile_onnx(model.SerializeToString(), name="product", options=BmodelOptions("bm1688", "W4F16"))
    result = torch.empty(1, *weight.shape)
    Net(made, 0, 1).run({"x": torch.eye(len(weight))[None]}, [result])
    assert relative(result[0].numpy(), four_bits(weight)) < HALF / 10
    assert relative(result[0].numpy(), weight) == pytest.approx(0.09, abs=0.02)


@pytest.mark.full
def test_a_layer_is_that_of_such_weights(toolchain, model_folder, tmp_path):
    model = hf.load(model_folder("llama"), llms.CAPACITY)
    tables = hf.rotary_tables(model, llms.CAPACITY)
    part = parts.block(model, 0, tables, 8)
    torch.manual_seed(0)
    mask = torch.full((8, 8), layout.HIDDEN).triu(1)[None, None]
    inputs = (torch.randn(1, 8, 64), torch.arange(8, dtype=torch.int32)[None], mask)
    made = compile_onnx(part.onnx(tmp_path), name=part.name, options=BmodelOptions("bm1688", "W4F16"))
    exact = part.module(*inputs)
    with_four_bits(model)
    wanted = parts.block(model, 0, tables, 8).module(*inputs)
    results = [torch.empty(one.shape) for one in wanted]
    Net(made, 0, 3).run(dict(zip(part.inputs, inputs, strict=True)), results)
    for result, right, before in zip(results, wanted, exact, strict=True):
        assert relative(result.numpy(), right.numpy()) < HALF
        assert relative(result.numpy(), before.numpy()) > 10 * HALF


@pytest.mark.full
def test_a_model_is_that_of_such_weights(bmodel_of, model_folder, tmp_path):
    """All the distance of a whole model's logits from its own in float32, which is large where weights are random, is
    that of its weights."""
    from transformers import AutoModelForCausalLM

    folder = model_folder("llama")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with_four_bits(model)
    model.save_pretrained(tmp_path)
    given = llms.prompt(5)
    tokens, wanted = llms.by_transformers(tmp_path, given, 3)
    _, exact = llms.by_transformers(folder, given, 1)
    made = generate(bmodel_of("llama", "bm1688", "W4F16"), given, 3, keep_logits=True)
    assert made.tokens == tokens and made.logits is not None
    assert relative(made.logits, wanted.numpy()) < HALF
    assert relative(made.logits[:1], exact.numpy()) > 0.5
