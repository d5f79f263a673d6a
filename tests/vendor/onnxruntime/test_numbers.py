"""Values in graph mode that ONNX Runtime, or what is written for it, would change: float64, zeros' signs, sizes."""

import math
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from tests.vendor.onnxruntime.regions import compiled, refused, subgraph

pytestmark = pytest.mark.usefixtures("graph_mode")

WIDE = torch.linspace(-3, 3, 12, dtype=torch.float64).reshape(3, 4) + 0.01
IMAGE, LINE = torch.randn(1, 2, 7, 9), torch.randn(1, 2, 11)


def in_graph_mode(function, *values, dynamic=False):
    options: Any = {"engine": "onnxruntime", "small_regions": "engine", "fallback": "allow"}
    with torch.no_grad():
        return torch.compile(function, backend="dlinfer", dynamic=dynamic, options=options)(*values)


def as_in_eager(function, *values, dynamic=False, tolerance=1e-5):
    results = pytree.tree_leaves(in_graph_mode(function, *values, dynamic=dynamic))
    wanted = pytree.tree_leaves(function(*values))
    torch.testing.assert_close(results, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


DOUBLES = {
    "scalar_tensor": lambda x: torch.scalar_tensor(0.1, dtype=torch.float64) * x,
    "fill": lambda x: x.clone().fill_(0.1) + 1,
    "hardtanh": lambda x: F.hardtanh(x, -0.1, 0.1),
    "threshold": lambda x: F.threshold(x, 0.1, 0.3),
    "arange": lambda x: torch.arange(0, 1, 0.1, dtype=torch.float64) + x.sum(),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([1]), 0.1),
    "nan_to_num": lambda x: (x * torch.nan).nan_to_num(0.1),
    "norm": lambda x: x.norm(p=2.5),
    "beyond float32": lambda x: x.clone().fill_(1e300) * 0.5,
}


@pytest.mark.parametrize("name", DOUBLES)
def test_numbers_of_float64(name):
    as_in_eager(DOUBLES[name], WIDE, tolerance=1e-14)


@pytest.mark.parametrize("number", [0.1, 1e300])
def test_a_python_float_that_is_given_back(number):
    def function(x, number):
        return x + 1, number * 3, WIDE * number

    _, given, product = in_graph_mode(function, torch.ones(2), number, dynamic=True)
    assert given == number * 3
    torch.testing.assert_close(product, WIDE * number, rtol=1e-15, atol=0)


def test_label_smoothing():
    x, target = torch.linspace(-3, 3, 12).reshape(3, 4), torch.tensor([1, 2, 0])
    as_in_eager(lambda x, target: F.cross_entropy(x, target, label_smoothing=0.1), x, target)


@pytest.mark.parametrize("options", [{}, {"mode": "sum", "include_last_offset": True}], ids=str)
def test_bags_end_no_process(options):
    """Asked for in a process of its own: ONNX Runtime's ended with SIGSEGV."""
    source = f"""
        import torch, torch.nn.functional as F
        def function(index, table, offsets):
            return F.embedding_bag(index, table, offsets, **{options!r})
        given = torch.tensor([1, 2, 3, 4, 1, 1]), torch.randn(10, 4), torch.tensor([0, 2, 6][:{3 if options else 2}])
        options = {{"engine": "onnxruntime", "small_regions": "engine", "fallback": "allow"}}
        with torch.no_grad():
            result = torch.compile(function, backend="dlinfer", options=options)(*given)
        torch.testing.assert_close(result, function(*given))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True, timeout=300)


# --- sizes by factors


RESIZED = {
    "antialias": ({"mode": "bilinear", "antialias": True}, 0.6),
    "bicubic antialias": ({"mode": "bicubic", "antialias": True}, 0.6),
    "bicubic that keeps the size": ({"mode": "bicubic"}, 1.1),
    "bilinear that keeps one size": ({"mode": "bilinear"}, (1.1, 2.5)),
    "nearest that keeps one size": ({"mode": "nearest"}, (1.1, 2.5)),
    "nearest-exact up": ({"mode": "nearest-exact"}, 1.7),
    "nearest-exact down": ({"mode": "nearest-exact"}, 0.7),
    "nearest-exact 1.9": ({"mode": "nearest-exact"}, 1.9),
    "sizes computed first": ({"mode": "nearest-exact", "recompute_scale_factor": True}, 1.3),
    "bilinear": ({"mode": "bilinear"}, 2.0),
    "nearest": ({"mode": "nearest"}, 0.5),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", RESIZED)
def test_sizes_by_factors(name, dynamic):
    options, factor = RESIZED[name]
    as_in_eager(lambda x: F.interpolate(x, scale_factor=factor, **options) * 2, IMAGE, dynamic=dynamic)


def test_factors_of_lines():
    as_in_eager(lambda x: F.interpolate(x, scale_factor=1.05, mode="linear") * 2, LINE)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_usual_factors_stay_in_the_session(factor):
    def function(x):
        return F.interpolate(x, scale_factor=factor, mode="bilinear")

    assert refused(subgraph(function, IMAGE)) == {}
    assert refused(subgraph(lambda x: F.interpolate(x, size=(5, 8), mode="bicubic"), IMAGE)) == {}


# --- zeros


ZEROS = torch.tensor([[0.0, -0.0, 2.0, -3.0]])
SIGNED = {
    "x + 0": lambda x: x.view(4) + 0,
    "0 + x": lambda x: 0.0 + x.view(4),
    "x * 1": lambda x: x.view(4) * 1,
    "x - 0": lambda x: x.view(4) - 0,
    "x / 1": lambda x: x.view(4) / 1,
    "clamp": lambda x: x.view(4).clamp(min=0),
    "clamp by tensors": lambda x: x.view(4).clamp(torch.zeros(4), torch.ones(4)),
    "trunc": lambda x: x.view(4).trunc(),
    "frac": lambda x: x.view(4).frac(),
    "a bound of float16": lambda x: x.view(4).half().clamp(min=0).float(),
}


@pytest.mark.parametrize("name", SIGNED)
def test_zeros_keep_their_signs(name):
    def function(x):
        result = SIGNED[name](x)
        return 1 / F.pad(result, (1, 1)), 1 / result

    as_in_eager(function, ZEROS)


def test_a_bound_that_is_no_number():
    as_in_eager(lambda x: x.clamp(min=math.nan) + x.clamp(torch.full((4,), math.nan)), ZEROS)


# --- convolutions


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_number_behind_a_convolution(dims):
    convolution = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    x, weight = torch.randn(1, 2, *[5] * dims), torch.randn(3, 2, *[3] * dims)

    def function(x, weight, number):
        return convolution(x, weight) + number, convolution(x, weight) + x.sum()

    as_in_eager(function, x, weight, torch.tensor(2.0), tolerance=1e-4)


def test_bounds_stay_in_the_session():
    x = torch.randn(4, 6)
    for function in (lambda x: x.clamp(-0.5, 0.5), lambda x: x.half().clamp(min=0.1)):
        (got,) = compiled(function, x, fixed=True).run(x)
        assert torch.equal(got, function(x))
