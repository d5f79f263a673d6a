"""dlinfer's fused elementwise ops: rotary embeddings and gated activations."""

import openvino.opset16 as op
import torch
from openvino import Output

from dlinfer.graph.torch_private.symbols import fixed_size
from dlinfer.vendor.openvino.builder import Builder
from dlinfer.vendor.openvino.lowerings.activation import gelu as _gelu
from dlinfer.vendor.openvino.lowerings.activation import swish
from dlinfer.vendor.openvino.lowerings.shapes import rank
from dlinfer.vendor.openvino.lowerings.slicing import cut, halves
from dlinfer.vendor.openvino.registry import Call, lowers

dlinfer = torch.ops.dlinfer


def _even_known(call: Call) -> str | None:
    name = "q" if "q" in call.arguments else "native_input"
    return None if fixed_size(call.fake(name).shape[-1]) is not None else "the head size is not fixed"


@lowers(dlinfer.apply_rotary_pos_emb.default, refuses=_even_known)
def rotary(b: Builder, q: Output, k: Output, cos: Output, sin: Output) -> list[Output]:
    sizes = b.call.fake("q").shape
    tables = [_per_token(b, q, table, len(sizes)) for table in (cos, sin)]
    return [_rotated(b, x, *tables) for x in (q, k)]


def _per_token(b: Builder, q: Output, table: Output, dims: int) -> Output:
    """Reshape ``table``, which has one row for each token, so that it broadcasts over the heads of q.

    table: [..., head_size]. dims: the rank of q. Returns [tokens, 1, head_size] or [batch, tokens, 1, head_size]."""
    size = b.size(table, -1)
    if rank(table) == dims - 1:
        return op.unsqueeze(table, b.axes([dims - 2])).output(0)
    leading = [b.size(q, dim) for dim in range(dims - 2)]
    return op.reshape(table, b.numbers([*leading, 1, size]), False).output(0)


def _rotated(b: Builder, x: Output, cos: Output, sin: Output) -> Output:
    first, second = halves(b, x)
    turned = op.concat([op.negative(second).output(0), first], rank(x) - 1)
    return op.add(op.multiply(x, cos), op.multiply(turned, sin)).output(0)


@lowers(dlinfer.apply_rotary_pos_emb_interleaved.default, refuses=_even_known)
def rotary_interleaved(b: Builder, x: Output, cos: Output, sin: Output, halves: bool) -> Output:
    size = b.size(x, -1)
    assert isinstance(size, int)
    half = size // 2
    cos, sin = (table if b.size(table, -1) == half else cut(b, table, -1, 0, half) for table in (cos, sin))
    first, second = cut(b, x, -1, 0, size, 2), cut(b, x, -1, 1, size, 2)
    real = op.subtract(op.multiply(first, cos), op.multiply(second, sin))
    imaginary = op.add(op.multiply(second, cos), op.multiply(first, sin))
    if halves:
        return op.concat([real, imaginary], rank(x) - 1).output(0)
    last = b.axes([rank(x)])
    pairs = op.concat([op.unsqueeze(real, last), op.unsqueeze(imaginary, last)], rank(x))
    return op.reshape(pairs, op.shape_of(x, "i64"), False).output(0)


@lowers(dlinfer.silu_mul.default)
def _silu_mul(b: Builder, gate: Output, up: Output) -> Output:
    return op.multiply(swish(b, gate), up).output(0)


@lowers(dlinfer.silu_and_mul.default)
def silu_and_mul(b: Builder, x: Output) -> Output:
    return _silu_mul(b, *halves(b, x))


lowers(dlinfer.gelu_mul.default)(
    lambda b, gate, up, tanh: op.multiply(_gelu(b, gate, "tanh" if tanh else "none"), up).output(0)
)
