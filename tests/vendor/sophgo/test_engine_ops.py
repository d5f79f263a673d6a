"""Every op of the engine's table on the emulator against torch, all in one bmodel, so that one compilation does."""

import pytest
import torch
from torch.nn import functional as F

from dlinfer.vendor.sophgo.engine.nodes import OPS
from tests.vendor.sophgo.regions import compiled, relative, subgraph

# What each shows -> a function of x, y [2, 8, 16] float32 (y above 0.5), image [1, 4, 8, 8] and weights.
CASES = {
    "linear": lambda v: F.linear(v["x"], v["w"], v["b"]),
    "matmul": lambda v: v["x"] @ v["y"].transpose(1, 2),
    "addmm": lambda v: torch.addmm(v["b"], v["x"][0], v["w"].t()),
    "add sub mul": lambda v: (v["x"] + v["y"] * 2.0 - 0.5) * v["y"],
    "div": lambda v: v["x"] / v["y"],
    "neg abs": lambda v: -v["x"].abs(),
    "sqrt rsqrt": lambda v: v["y"].sqrt() + v["y"].rsqrt(),
    "reciprocal": lambda v: v["y"].reciprocal(),
    "pow": lambda v: v["x"].pow(2) + v["y"].pow(0.5),
    "exp": lambda v: v["x"].exp(),
    "erf": lambda v: v["x"].erf(),
    "tanh sigmoid": lambda v: v["x"].tanh() + v["y"].sigmoid(),
    "relu": lambda v: v["x"].relu(),
    "silu": lambda v: F.silu(v["x"]),
    "gelu": lambda v: F.gelu(v["x"]),
    "gelu tanh": lambda v: F.gelu(v["x"], approximate="tanh"),
    "clamp": lambda v: v["x"].clamp(-0.5, 0.75),
    "maximum minimum": lambda v: torch.maximum(v["x"], v["y"]) + torch.minimum(v["x"], v["y"]),
    "softmax": lambda v: v["x"].softmax(-1),
    "softmax of rows": lambda v: v["x"].softmax(1),
    "layer_norm": lambda v: F.layer_norm(v["x"], (16,), v["b"], v["b2"], 1e-5),
    "rms_norm": lambda v: F.rms_norm(v["x"], (16,), v["b"], 1e-6),
    "mean sum": lambda v: v["x"].mean(-1, keepdim=True) + v["x"].sum(1, keepdim=True),
    "transpose reshape": lambda v: v["x"].transpose(1, 2).reshape(2, 4, 32) * 1.5,
    "permute": lambda v: v["x"].permute(2, 0, 1) * 1.5,
    "cat": lambda v: torch.cat([v["x"], v["y"]], 1) * 1.5,
    "stack": lambda v: torch.stack([v["x"], v["y"]], 1) * 1.5,
    "split": lambda v: v["x"].split(8, -1)[1] * v["y"].chunk(2, -1)[0],
    "slice": lambda v: v["x"][:, 1:7:2, 3:] * 1.5,
    "select": lambda v: v["x"][:, 3] * 1.5,
    "expand": lambda v: v["x"][:, :1].expand(2, 8, 16) * v["y"],
    "unsqueeze squeeze": lambda v: (v["x"].unsqueeze(1) * 1.5).squeeze(1) * 2.0,
    "pad": lambda v: F.pad(v["x"], (1, 2)),
    "flatten": lambda v: v["x"].flatten(1) * 1.5,
    "conv2d": lambda v: F.conv2d(v["image"], v["kernel"], stride=2, padding=1),
    "max_pool2d": lambda v: F.max_pool2d(v["image"], 2),
    "avg_pool2d": lambda v: F.avg_pool2d(v["image"], 2),
    "adaptive_avg_pool2d": lambda v: F.adaptive_avg_pool2d(v["image"], 1),
    "embedding": lambda v: F.embedding(v["ids"], v["w"]),
    "silu_and_mul": lambda v: torch.ops.dlinfer.silu_and_mul(v["x"]),
    "attention with a mask": lambda v: F.scaled_dot_product_attention(
        v["x"][:, None], v["y"][:, None], v["x"][:, None], attn_mask=v["mask"]
    ),
    "grouped attention": lambda v: F.scaled_dot_product_attention(
        v["x"].view(2, 4, 4, 8),
        v["y"][:, :, :8].reshape(2, 2, 4, 8),
        v["y"][:, :, 8:].reshape(2, 2, 4, 8),
        enable_gqa=True,
    ),
    "attention": lambda v: F.scaled_dot_product_attention(v["x"][:, None], v["y"][:, None], v["x"][:, None]),
}
TOLERANCE = 1e-5
"""Of float32 on both sides; the chip adds up in another order, and its exp and erf are approximations."""


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    return {
        "x": random(2, 8, 16),
        "y": random(2, 8, 16).abs() + 0.5,
        "image": random(1, 4, 8, 8),
        "mask": torch.full((8, 8), -torch.inf)
        .triu(1)
        .index_fill(0, torch.tensor([2]), -torch.inf),  # one sees nothing
        "ids": torch.tensor([[0, 5, 11, 3]]),
        "w": random(12, 16),
        "b": random(12),
        "b2": random(16),
        "kernel": random(6, 4, 3, 3),
    }


def fitting(name: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """A case's result; norms take a weight as long as a row."""
    if "norm" in name:
        given = {**given, "b": given["w"][0]}
    return CASES[name](given)


def test_every_case_gives_what_torch_gives(toolchain):
    given = values()
    names, tensors = list(given), list(given.values())

    def model(*args):
        known = dict(zip(names, args, strict=True))
        return [fitting(name, known) for name in CASES]

    region = compiled(model, *tensors, static=range(5, len(tensors)))
    results = region.run(*tensors)
    wanted = model(*tensors)
    far = {
        name: relative(result, right)
        for name, result, right in zip(CASES, results, wanted, strict=True)
        if relative(result, right) > TOLERANCE or result.shape != right.shape
    }
    assert far == {}


def test_the_cases_are_all_ops_of_the_table():
    import onnx

    from dlinfer.graph.functional.functionalize import function_of
    from dlinfer.graph.onnx.export import export
    from dlinfer.vendor.sophgo.compiler.translations import table

    given = values()
    names, tensors = list(given), list(given.values())
    written = set()
    for name in CASES:
        region = subgraph(
            lambda *args, name=name: fitting(name, dict(zip(names, args, strict=True))), *tensors
        )
        model = export(function_of(region).graph_module, translations=table).to_bytes()
        written |= {node.op_type for node in onnx.ModelProto.FromString(model).graph.node}
    assert written <= OPS
    assert sorted(OPS - written) == sorted({"Identity", "Shape"})  # of views and of open sizes


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.cumsum(1), "CumSum"),
        (lambda x: x > 0, "its result is bool"),
        (lambda x: x.argmax(-1), "its result is int64"),
        (torch.rand_like, "random"),
        (lambda x: x.double(), "its result is float64"),
        (lambda x: x.sort(-1).values, "its result is int64"),
    ],
)
def test_what_is_not_taken_has_a_reason(function, reason):
    from tests.vendor.sophgo.regions import refused

    reasons = refused(subgraph(function, torch.randn(2, 8)))
    assert any(reason in text for text in reasons.values()), reasons
