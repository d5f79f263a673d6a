"""Products, convolutions, pooling, normalisation and activations, at several batch sizes and lengths."""

import pytest
import torch
import torch.nn.functional as F

from tests.vendor.openvino.lowering import lowered, same

x = torch.randn(3, 5, 8)
weight, bias = torch.randn(6, 8), torch.randn(6)
others = ((torch.randn(2, 9, 8), weight, bias), (torch.randn(1, 1, 8), weight, bias))


def test_linear():
    same(F.linear, x, weight, bias, others=others)
    same(F.linear, x[0], weight)
    same(lambda a, w: (F.linear(a, w), F.linear(a, w[0])), x[0, 0], weight)
    same(F.linear, x.bfloat16(), weight.bfloat16(), bias.bfloat16(), rtol=5e-2, atol=5e-2)


def test_products():
    left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    same(
        lambda a, b: (a @ b, torch.bmm(a, b), a[0] @ b[0], a @ b[0], a[0] @ b, a[0, 0] @ b[0, :, 0]),
        left,
        right,
    )
    same(
        lambda a, b: (torch.mm(a[0], b[0]), torch.mv(a[0], b[0, :, 0]), torch.dot(a[0, 0], b[0, :, 1])),
        left,
        right,
    )
    same(lambda a, b: torch.baddbmm(a @ b, a, b, beta=0.5, alpha=2), left, right)
    same(lambda a, b: torch.addmm(a[0] @ b[0], a[0], b[0], beta=0), left, right)
    same(lambda a, b: (torch.outer(a[0, 0], b[0, 0]), torch.einsum("bij,bjk->bik", a, b)), left, right)


def test_products_of_whole_numbers_are_refused():
    _, report = lowered(lambda a: a @ a.t(), torch.randint(5, (3, 4)), fallback="allow")
    ((_, reason),) = report.refusals()
    assert "matrices of integers" in reason


IMAGE = torch.randn(2, 4, 11, 9)
LARGER = torch.randn(3, 4, 16, 12)

CONVOLUTIONS = {
    "plain": F.conv2d,
    "strided, padded, dilated": lambda a, w: F.conv2d(a, w, stride=2, padding=(1, 2), dilation=2),
    "same": lambda a, w: F.conv2d(a, w, padding="same"),
    "valid, with a bias": lambda a, w: F.conv2d(a, w, w[:, 0, 0, 0], padding="valid"),
    "grouped": lambda a, w: F.conv2d(a, w[:, :2], groups=2),
    "by channel": lambda a, w: F.conv2d(a, w[:4, :1], groups=4, padding=1),
    "patches": lambda a, w: F.conv2d(a, w, stride=3).flatten(2).transpose(1, 2).contiguous(),
    "transposed": lambda a, w: F.conv_transpose2d(a, w[:4], stride=2, padding=1, output_padding=1),
    "transposed, grouped": lambda a, w: F.conv_transpose2d(a, w[:4], groups=2),
    "one dimension": lambda a, w: F.conv1d(a[..., 0], w[..., 0], padding=1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    kernel = torch.randn(6, 4, 3, 3)  # a parameter's sizes are fixed in a graph
    others = [(LARGER, kernel)]
    same(CONVOLUTIONS[name], IMAGE, kernel, others=others, fixed=kernel.shape, rtol=1e-4, atol=1e-4)


POOLING = {
    "max": lambda a: (F.max_pool2d(a, 2), F.max_pool2d(a, 3, 2, 1)),
    "max, ceil": lambda a: F.max_pool2d(a, 3, 2, 1, ceil_mode=True),
    "average": lambda a: (F.avg_pool2d(a, 2), F.avg_pool2d(a, 3, 2, 1)),
    "average of what is there": lambda a: F.avg_pool2d(a, 3, 2, 1, count_include_pad=False),
    "average, ceil": lambda a: F.avg_pool2d(a, 3, 2, 1, ceil_mode=True),
    "adaptive": lambda a: (F.adaptive_avg_pool2d(a, 1), F.adaptive_avg_pool2d(a, (3, 2))),
    "one dimension": lambda a: (F.max_pool1d(a[..., 0], 2), F.avg_pool1d(a[..., 0], 2)),
    "one dimension, adaptive": lambda a: F.adaptive_avg_pool1d(a[..., 0], 3),
}


@pytest.mark.parametrize("name", POOLING)
def test_pooling(name):
    # torch fixes the length when it captures max_pool1d.
    fixed = name == "one dimension"
    same(POOLING[name], IMAGE, others=[(LARGER[:, :, :11] if fixed else LARGER,)])


UPSAMPLING = {
    "nearest": lambda a: (F.interpolate(a, scale_factor=2), F.interpolate(a, size=(7, 20))),
    "bilinear": lambda a: F.interpolate(a, size=(7, 20), mode="bilinear"),
    "bilinear by a factor": lambda a: F.interpolate(a, scale_factor=2.5, mode="bilinear"),
    "bilinear, corners": lambda a: F.interpolate(a, size=(7, 20), mode="bilinear", align_corners=True),
    "bicubic": lambda a: F.interpolate(a, size=(7, 20), mode="bicubic"),
    "bicubic, corners": lambda a: F.interpolate(a, size=(23, 5), mode="bicubic", align_corners=True),
    "pixels": lambda a: F.pixel_shuffle(a, 2),
}


@pytest.mark.parametrize("name", UPSAMPLING)
def test_upsampling(name):
    # Positions and weights are float32 in both, in another order of operations.
    same(UPSAMPLING[name], IMAGE, others=[(LARGER,)], rtol=1e-4, atol=1e-4)


NORMS = {
    "layer": lambda a: F.layer_norm(a, (8,)),
    "layer, affine": lambda a: F.layer_norm(a, (8,), a[0, 0], a[0, 1], 1e-6),
    "layer of two dimensions": lambda a: F.layer_norm(a[..., None].expand(-1, -1, -1, 3), (8, 3)),
    "group": lambda a: F.group_norm(a.transpose(1, 2), 4, a[0, 0], a[0, 1]),
    "batch": lambda a: F.batch_norm(a.transpose(1, 2), a[0, 0], a[0, 1].abs(), a[0, 2], a[0, 3]),
    "instance": lambda a: F.instance_norm(a.transpose(1, 2)),
    "root mean square": lambda a: (F.rms_norm(a, (8,), a[0, 0]), F.rms_norm(a, (8,), eps=1e-5)),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalisation(name):
    same(NORMS[name], x, others=[(torch.randn(2, 9, 8),)], rtol=1e-4, atol=1e-5)


ACTIVATIONS = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu, "tanh gelu": lambda a: F.gelu(a, approximate="tanh"),
    "leaky": F.leaky_relu, "elu": F.elu, "celu": lambda a: F.elu(a, 2.0), "softplus": F.softplus,
    "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "mish": F.mish, "relu6": F.relu6, "glu": F.glu,
    "hardtanh": lambda a: F.hardtanh(a, -0.5, 0.7), "log sigmoid": F.logsigmoid,
    "prelu": lambda a: F.prelu(a, a[0, :, 0]),
    "softmax": lambda a: (a.softmax(-1), a.softmax(0), a.softmax(1, dtype=torch.float32)),
    "log softmax": lambda a: (a.log_softmax(-1), a.log_softmax(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(name, dtype):
    same(ACTIVATIONS[name], (3 * x).to(dtype), others=[((40 * torch.randn(2, 5, 8)).to(dtype),)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_root_mean_square_adds_by_default(dtype):
    """float32's epsilon, in 16 bits too."""
    small = (torch.randn(2, 5, 8) * 0.02).to(dtype)
    same(lambda a: F.rms_norm(a, a.shape[-1:]), small, others=[((torch.randn(3, 4, 8) * 0.02).to(dtype),)])
