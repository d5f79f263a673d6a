"""What each op of torch is in a node list: a function of the writer, the node's result and its arguments.

A function raises UntranslatableError, with the reason, for a call that it does not serve.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from dlinfer.graph.dialect import arguments, fake, overload
from dlinfer.vendor.megengine.nodes import NodeList, UntranslatableError, Value, unfit

aten = torch.ops.aten
ours = torch.ops.dlinfer

Translation = Callable[..., Any]
TABLE: dict[Any, Translation] = {}


def translation(*ops: Any) -> Callable[[Translation], Translation]:
    """Register a function for overloads: it gets the writer, the fake result, then the op's arguments by name."""

    def register(function: Translation) -> Translation:
        TABLE.update(dict.fromkeys(ops, function))
        return function

    return register


def translate(writer: NodeList, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """The value, or the list of values, of a node. Raises UntranslatableError."""
    if node.target is operator.getitem:
        return value_of(node.all_input_nodes[0])[node.args[1]]
    function = TABLE.get(overload(node))
    if function is None:
        raise UntranslatableError("no translation to MegEngine")
    given = {name: map_arg(value, value_of) for name, value in arguments(node).items()}
    return function(writer, fake(node), **given)


def float32(*values: Any) -> None:
    """Raise UntranslatableError where a value is no float32 tensor."""
    for value in values:
        if isinstance(value, Value) and value.dtype != torch.float32:
            kind = str(value.dtype).removeprefix("torch.")
            raise UntranslatableError(f"it computes with {kind}; MegEngine's numbers would be other ones")


def axis_of(dim: int, rank: int) -> int:
    """A dimension counted from the first one."""
    return dim % rank


# --- arithmetic


_UNARY = {
    "neg": aten.neg.default,
    "exp": aten.exp.default,
    "log": aten.log.default,
    "sqrt": aten.sqrt.default,
    "abs": aten.abs.default,
    "sin": aten.sin.default,
    "cos": aten.cos.default,
    "tanh": aten.tanh.default,
    "sigmoid": aten.sigmoid.default,
    "relu": aten.relu.default,
}


def _unary(kind: str) -> Translation:
    def write(writer: NodeList, result: Tensor, self: Value) -> Value:
        float32(self)
        return writer.op(kind, self, like=result)

    return write


for _kind, _op in _UNARY.items():
    TABLE[_op] = _unary(_kind)


def _binary(kind: str) -> Translation:
    def write(writer: NodeList, result: Tensor, self: Any, other: Any, alpha: float = 1) -> Value:
        float32(self, other)
        if alpha != 1:
            other = writer.op("mul", other, alpha, like=other) if isinstance(other, Value) else other * alpha
        return writer.op(kind, self, other, like=result)

    return write


for _kind, _ops in {
    "add": (aten.add.Tensor, aten.add.Scalar),
    "sub": (aten.sub.Tensor, aten.sub.Scalar),
    "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "maximum": (aten.maximum.default,),
    "minimum": (aten.minimum.default,),
}.items():
    for _op in _ops:
        TABLE[_op] = _binary(_kind)


@translation(aten.div.Tensor, aten.div.Scalar)
def _div(writer: NodeList, result: Tensor, self: Value, other: Any) -> Value:
    float32(self, other)
    return writer.op("div", self, other, like=result)


@translation(aten.rsub.Scalar)
def _rsub(writer: NodeList, result: Tensor, self: Value, other: float, alpha: float = 1) -> Value:
    float32(self)
    return writer.op("sub", other, writer.op("mul", self, alpha, like=self), like=result)


@translation(aten.pow.Tensor_Scalar)
def _pow(writer: NodeList, result: Tensor, self: Value, exponent: float) -> Value:
    float32(self)
    if exponent == 2:
        return writer.op("mul", self, self, like=result)
    if exponent in (0.5, -0.5):
        root = writer.op("sqrt", self, like=result)
        return root if exponent > 0 else writer.op("div", 1.0, root, like=result)
    raise UntranslatableError(f"a power of {exponent}: MegEngine's differs for negative numbers")


@translation(aten.rsqrt.default)
def _rsqrt(writer: NodeList, result: Tensor, self: Value) -> Value:
    float32(self)
    return writer.op("div", 1.0, writer.op("sqrt", self, like=result), like=result)


@translation(aten.reciprocal.default)
def _reciprocal(writer: NodeList, result: Tensor, self: Value) -> Value:
    float32(self)
    return writer.op("div", 1.0, self, like=result)


def _compare(kind: str) -> Translation:
    def write(writer: NodeList, result: Tensor, self: Value, other: Any) -> Value:
        float32(self, other)
        return writer.op(kind, self, other, like=result, dtype=torch.bool)

    return write


for _kind, _name in {
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
}.items():
    TABLE[getattr(aten, _name).Tensor] = TABLE[getattr(aten, _name).Scalar] = _compare(_kind)


@translation(aten.masked_fill.Scalar)
def _masked_fill(writer: NodeList, result: Tensor, self: Value, mask: Value, value: float) -> Value:
    float32(self)
    if not math.isfinite(value):
        raise UntranslatableError(f"{value} as a number: it is no JSON, and MegEngine's softmax of it is NaN")
    return _chosen(writer, result, mask, writer.op("mul", self, 0.0, like=self), self, value)


@translation(aten.where.self)
def _where(writer: NodeList, result: Tensor, condition: Value, self: Value, other: Value) -> Value:
    float32(self, other)
    picks = [broadcast(writer, one, tuple(result.shape)) for one in (truth(writer, condition), self, other)]
    return writer.op("where", *picks, like=result, dtype=torch.float32)


def _chosen(writer: NodeList, result: Tensor, mask: Value, zeros: Value, other: Value, value: float) -> Value:
    filled = writer.op("add", zeros, value, like=zeros)
    return _where(writer, result, mask, filled, other)


def truth(writer: NodeList, value: Value) -> Value:
    """A condition as MegEngine's: an input of bool is bytes at the boundary."""
    if value.dtype != torch.bool:
        raise UntranslatableError("a condition that is no bool")
    if any(value.name == name for name, _, _ in writer.inputs):
        return writer.op("not_equal", value, 0, like=value, dtype=torch.bool)
    return value


def broadcast(writer: NodeList, value: Value, shape: tuple[int, ...]) -> Value:
    """A value in these sizes."""
    return value if value.shape == shape else writer.op("broadcast", value, like=shape, shape=list(shape))


# --- activations


@translation(aten.silu.default)
def _silu(writer: NodeList, result: Tensor, self: Value) -> Value:
    float32(self)
    return writer.op("mul", self, writer.op("sigmoid", self, like=result), like=result)


@translation(aten.gelu.default)
def _gelu(writer: NodeList, result: Tensor, self: Value, approximate: str = "none") -> Value:
    float32(self)
    if approximate == "none":
        return writer.op("gelu", self, like=result)
    cube = writer.op("mul", writer.op("mul", self, self, like=self), self, like=self)
    inner = writer.op("add", self, writer.op("mul", cube, 0.044715, like=self), like=self)
    curve = writer.op("tanh", writer.op("mul", inner, math.sqrt(2 / math.pi), like=self), like=self)
    half = writer.op("mul", self, 0.5, like=self)
    return writer.op("mul", half, writer.op("add", curve, 1.0, like=self), like=result)


@translation(aten.softmax.int, aten._softmax.default)
def _softmax(writer: NodeList, result: Tensor, self: Value, dim: int, **rest: Any) -> Value:
    float32(self)
    if rest.get("dtype") not in (None, torch.float32):
        raise UntranslatableError("a softmax in another dtype")
    return writer.op("softmax", self, like=result, axis=axis_of(dim, len(self.shape)))


@translation(ours.silu_and_mul.default)
def _silu_and_mul(writer: NodeList, result: Tensor, x: Value) -> Value:
    size = x.shape[-1] // 2
    gate, up = (part(writer, x, -1, start, start + size) for start in (0, size))
    return writer.op("mul", _silu(writer, result, gate), up, like=result)


@translation(ours.silu_mul.default)
def _silu_mul(writer: NodeList, result: Tensor, gate: Value, up: Value) -> Value:
    float32(up)
    return writer.op("mul", _silu(writer, result, gate), up, like=result)


@translation(ours.gelu_mul.default)
def _gelu_mul(writer: NodeList, result: Tensor, gate: Value, up: Value, tanh: bool) -> Value:
    float32(up)
    return writer.op("mul", _gelu(writer, result, gate, "tanh" if tanh else "none"), up, like=result)


# --- reductions and norms


def reduce(writer: NodeList, kind: str, value: Value, dims: Sequence[int], keepdim: bool) -> Value:
    """Sum, mean, largest or smallest over some dimensions."""
    rank = len(value.shape)
    axes = sorted({axis_of(dim, rank) for dim in dims})
    shape = [1 if axis in axes else size for axis, size in enumerate(value.shape)]
    if not keepdim:
        shape = [size for axis, size in enumerate(value.shape) if axis not in axes]
    if not shape:
        raise UntranslatableError("a result without dimensions, which MegEngine Lite has not")
    return writer.op("reduce", value, like=shape, how=kind, axes=axes, keepdims=keepdim)


def _reduction(kind: str) -> Translation:
    def write(
        writer: NodeList,
        result: Tensor,
        self: Value,
        dim: Any = None,
        keepdim: bool = False,
        dtype: Any = None,
    ) -> Value:
        float32(self)
        if dtype not in (None, torch.float32):
            raise UntranslatableError("a reduction in another dtype")
        dims = dim or range(len(self.shape))
        return reduce(writer, kind, self, dims, keepdim)

    return write


TABLE[aten.mean.dim] = _reduction("mean")
TABLE[aten.sum.dim_IntList] = _reduction("sum")
TABLE[aten.amax.default] = _reduction("max")
TABLE[aten.amin.default] = _reduction("min")


@translation(aten.layer_norm.default)
def _layer_norm(
    writer: NodeList,
    result: Tensor,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value:
    float32(input, weight, bias)
    dims = range(-len(normalized_shape), 0)
    centred = writer.op("sub", input, reduce(writer, "mean", input, dims, True), like=result)
    normed = _over_root(writer, centred, dims, eps)
    if weight is not None:
        normed = writer.op("mul", normed, weight, like=result)
    return normed if bias is None else writer.op("add", normed, bias, like=result)


def _over_root(writer: NodeList, value: Value, dims: Sequence[int], eps: float) -> Value:
    square = writer.op("mul", value, value, like=value)
    mean = reduce(writer, "mean", square, dims, True)
    root = writer.op("sqrt", writer.op("add", mean, eps, like=mean), like=mean)
    return writer.op("div", value, root, like=value)


@translation(ours.rms_norm.default)
def _rms_norm(writer: NodeList, result: Tensor, x: Value, weight: Value, eps: float) -> Value:
    float32(x, weight)
    return writer.op("mul", _over_root(writer, x, (-1,), eps), weight, like=result)


@translation(ours.add_rms_norm.default)
def _add_rms_norm(
    writer: NodeList, result: Sequence[Tensor], x: Value, residual: Value, weight: Value, eps: float
) -> list[Value]:
    float32(x, residual)
    total = writer.op("add", x, residual, like=x)
    return [_rms_norm(writer, result[0], total, weight, eps), total]


# --- products


@translation(aten.linear.default)
def _linear(
    writer: NodeList, result: Tensor, input: Value, weight: Value, bias: Value | None = None
) -> Value:
    float32(input, weight, bias)
    if len(weight.shape) != 2:
        raise UntranslatableError("a weight that is no matrix")
    rows = math.prod(input.shape[:-1])
    flat = writer.op("reshape", input, like=(rows, input.shape[-1]), shape=[rows, input.shape[-1]])
    made = writer.op("matmul", flat, weight, like=(rows, weight.shape[0]), transpose_b=True)
    if bias is not None:
        made = writer.op("add", made, bias, like=made)
    return writer.op("reshape", made, like=result, shape=list(result.shape))


@translation(ours.linear.default)
def _own_linear(writer: NodeList, result: Tensor, x: Value, weight: Value, bias: Value | None) -> Value:
    return _linear(writer, result, x, weight, bias)


@translation(ours.linears.default)
def _linears(
    writer: NodeList,
    result: Sequence[Tensor],
    x: Value,
    weights: Sequence[Value],
    biases: Sequence[Value | None],
) -> list[Value]:
    return [_linear(writer, *one) for one in zip(result, [x] * len(result), weights, biases, strict=True)]


@translation(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(writer: NodeList, result: Tensor, **given: Value) -> Value:
    left, right = given["self"], given.get("other", given.get("mat2"))
    assert right is not None
    float32(left, right)
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise UntranslatableError("a product with a vector")
    return product(writer, left, right, tuple(result.shape))


def product(
    writer: NodeList, left: Value, right: Value, shape: tuple[int, ...], transpose: bool = False
) -> Value:
    """Matrix products of equal batches: MegEngine's are of at most three dimensions, so batches are one."""
    if len(shape) == 2:
        return writer.op("matmul", left, right, like=shape, transpose_b=transpose)
    batch = shape[:-2]
    flat = []
    for one in (left, right):
        full = broadcast(writer, one, (*batch, *one.shape[-2:]))
        packed = (math.prod(batch), *one.shape[-2:])
        flat.append(writer.op("reshape", full, like=packed, shape=list(packed)))
    made = writer.op("matmul", *flat, like=(math.prod(batch), *shape[-2:]), transpose_b=transpose)
    return writer.op("reshape", made, like=shape, shape=list(shape))


@translation(aten.addmm.default)
def _addmm(
    writer: NodeList,
    result: Tensor,
    self: Value,
    mat1: Value,
    mat2: Value,
    beta: float = 1,
    alpha: float = 1,
) -> Value:
    float32(self, mat1, mat2)
    if (beta, alpha) != (1, 1):
        raise UntranslatableError("addmm with factors")
    return writer.op("add", writer.op("matmul", mat1, mat2, like=result), self, like=result)


@translation(aten.conv2d.default)
def _conv2d(
    writer: NodeList,
    result: Tensor,
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> Value:
    float32(input, weight, bias)
    if len(input.shape) != 4 or groups != 1:
        raise UntranslatableError("a convolution in groups, or of a single image")
    settings = {
        name: list(value) * (2 if len(value) == 1 else 1)
        for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation))
    }
    made = writer.op("convolution", input, weight, like=result, groups=groups, **settings)
    if bias is None:
        return made
    shape = (1, bias.shape[0], 1, 1)
    return writer.op("add", made, writer.op("reshape", bias, like=shape, shape=list(shape)), like=result)


@translation(aten.embedding.default)
def _embedding(writer: NodeList, result: Tensor, weight: Value, indices: Value, **_: Any) -> Value:
    float32(weight)
    if not any(indices.name == name for name, _, _ in writer.inputs):
        raise UntranslatableError(
            "rows that are looked up by computed numbers, which nobody has range-checked"
        )
    rows = writer.indices.get(indices.name, weight.shape[0])
    writer.indices[indices.name] = min(rows, weight.shape[0])
    return writer.op("rows", weight, indices, like=result)


@translation(aten.scaled_dot_product_attention.default)
def _attention(
    writer: NodeList,
    result: Tensor,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    float32(query, key, value)
    if dropout_p or len(query.shape) < 3:
        raise UntranslatableError("attention with dropout, or of single matrices")
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (_repeated(writer, one, query.shape[-3]) for one in (key, value))
    batch, long, wide = query.shape[:-2], query.shape[-2], key.shape[-2]
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    scores = product(
        writer, writer.op("mul", query, factor, like=query), key, (*batch, long, wide), transpose=True
    )
    masks = [] if attn_mask is None else [attn_mask]
    if is_causal:
        later = writer.op("later", like=(long, wide), dtype=torch.bool, rows=long, columns=wide)
        return product(writer, _weights(writer, scores, None, later), value, tuple(result.shape))
    mask = masks[0] if masks else None
    if mask is not None and mask.dtype != torch.bool:
        float32(mask)
        # A row of minus infinities is none of softmax's; torch gives zeros for it.
        lowest = float(torch.finfo(torch.float32).min)
        added = writer.op("maximum", mask, lowest, like=mask)
        hidden = writer.op("less", mask, lowest, like=mask, dtype=torch.bool)
        total = writer.op("add", scores, added, like=scores)
        return product(writer, _weights(writer, total, None, hidden), value, tuple(result.shape))
    weights = _weights(writer, scores, mask, None)
    return product(writer, weights, value, tuple(result.shape))


def _weights(writer: NodeList, scores: Value, seen: Value | None, hidden: Value | None) -> Value:
    """Softmax over the last dimension without what is hidden; zeros where all of a row is."""
    if seen is None and hidden is None:
        return writer.op("softmax", scores, like=scores, axis=len(scores.shape) - 1)
    zeros = writer.op("mul", scores, 0.0, like=scores)
    if seen is not None:
        condition = broadcast(writer, truth(writer, seen), scores.shape)
        low, kept = writer.op("sub", zeros, 1e30, like=scores), scores
        visible = writer.op("where", condition, kept, low, like=scores, dtype=torch.float32)
        shifted = writer.op("sub", visible, reduce(writer, "max", visible, (-1,), True), like=scores)
        powers = writer.op("exp", shifted, like=scores)
        powers = writer.op("where", condition, powers, zeros, like=scores, dtype=torch.float32)
    else:
        assert hidden is not None
        condition = broadcast(writer, hidden, scores.shape)
        low = writer.op("sub", zeros, 1e30, like=scores)
        visible = writer.op("where", condition, low, scores, like=scores, dtype=torch.float32)
        shifted = writer.op("sub", visible, reduce(writer, "max", visible, (-1,), True), like=scores)
        powers = writer.op("exp", shifted, like=scores)
        powers = writer.op("where", condition, zeros, powers, like=scores, dtype=torch.float32)
    total = reduce(writer, "sum", powers, (-1,), True)
    return writer.op("div", powers, writer.op("maximum", total, 1e-30, like=total), like=scores)


def _repeated(writer: NodeList, heads: Value, count: int) -> Value:
    """Each head several times, one behind the other."""
    *batch, few, length, size = heads.shape
    apart = (*batch, few, 1, length, size)
    many = (*batch, few, count // few, length, size)
    whole = (*batch, count, length, size)
    made = writer.op("reshape", heads, like=apart, shape=list(apart))
    made = writer.op("broadcast", made, like=many, shape=list(many))
    return writer.op("reshape", made, like=whole, shape=list(whole))


# --- sizes and places


@translation(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
)
def _reshape(writer: NodeList, result: Tensor, **given: Any) -> Value:
    return writer.op("reshape", _own(writer, given["self"]), like=result, shape=list(result.shape))


@translation(
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
    aten.lift_fresh_copy.default,
)
def _same(writer: NodeList, result: Tensor, **given: Any) -> Value:
    return next(value for value in given.values() if isinstance(value, Value))


@translation(aten.transpose.int)
def _transpose(writer: NodeList, result: Tensor, self: Value, dim0: int, dim1: int) -> Value:
    order = list(range(len(self.shape)))
    first, second = axis_of(dim0, len(order)), axis_of(dim1, len(order))
    order[first], order[second] = order[second], order[first]
    return writer.op("transpose", _own(writer, self), like=result, order=order)


@translation(aten.t.default)
def _t(writer: NodeList, result: Tensor, self: Value) -> Value:
    return self if len(self.shape) < 2 else _transpose(writer, result, self, 0, 1)


@translation(aten.permute.default)
def _permute(writer: NodeList, result: Tensor, self: Value, dims: Sequence[int]) -> Value:
    order = [axis_of(dim, len(self.shape)) for dim in dims]
    return writer.op("transpose", _own(writer, self), like=result, order=order)


@translation(aten.expand.default)
def _expand(writer: NodeList, result: Tensor, self: Value, **_: Any) -> Value:
    return broadcast(writer, _own(writer, self), tuple(result.shape))


def part(writer: NodeList, value: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
    """A stretch of one dimension."""
    axis = axis_of(dim, len(value.shape))
    count = len(range(start, stop, step))
    shape = [count if index == axis else size for index, size in enumerate(value.shape)]
    return writer.op(
        "subtensor", _own(writer, value), like=shape, axis=axis, start=start, stop=stop, step=step
    )


@translation(aten.slice.Tensor)
def _slice(
    writer: NodeList,
    result: Tensor,
    self: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    size = self.shape[axis_of(dim, len(self.shape))]
    first, last, every = slice(start, end, step).indices(size)
    return part(writer, self, dim, first, last, every)


@translation(aten.select.int)
def _select(writer: NodeList, result: Tensor, self: Value, dim: int, index: int) -> Value:
    place = index % self.shape[axis_of(dim, len(self.shape))]
    made = part(writer, self, dim, place, place + 1)
    return writer.op("reshape", made, like=result, shape=list(result.shape))


@translation(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes)
def _split(writer: NodeList, result: Sequence[Tensor], dim: int = 0, **given: Any) -> list[Value]:
    parts, start = [], 0
    for one in result:
        stop = start + one.shape[axis_of(dim, one.ndim)]
        parts.append(part(writer, given["self"], dim, start, stop))
        start = stop
    return parts


@translation(aten.unbind.int)
def _unbind(writer: NodeList, result: Sequence[Tensor], self: Value, dim: int = 0) -> list[Value]:
    return [_select(writer, one, self, dim, index) for index, one in enumerate(result)]


@translation(aten.cat.default)
def _cat(writer: NodeList, result: Tensor, tensors: Sequence[Value], dim: int = 0) -> Value:
    float32(*tensors)
    return writer.op("concat", *tensors, like=result, axis=axis_of(dim, result.ndim))


@translation(aten.stack.default)
def _stack(writer: NodeList, result: Tensor, tensors: Sequence[Value], dim: int = 0) -> Value:
    float32(*tensors)
    axis = axis_of(dim, result.ndim)
    shape = [1 if index == axis else size for index, size in enumerate(result.shape)]
    lifted = [writer.op("reshape", one, like=shape, shape=shape) for one in tensors]
    return writer.op("concat", *lifted, like=result, axis=axis)


def _own(writer: NodeList, value: Value) -> Value:
    """A value that may be moved about: integers only look up rows, and an input of bool is bytes."""
    if value.dtype == torch.bool:
        return truth(writer, value)
    float32(value)
    return value


def refusal(node: fx.Node) -> str | None:
    """Why a node has no translation: it is written by itself. For ``Engine.refuses``."""
    writer, values = NodeList(), {}

    def value_of(parent: fx.Node) -> Any:
        if parent not in values:
            values[parent] = _stand_in(writer, parent)
        return values[parent]

    try:
        for tensor in (one for one in _leaves(fake(node)) if isinstance(one, Tensor)):
            reason = unfit(tensor)
            if reason is None and tensor.dtype not in (torch.float32, torch.bool):
                reason = (
                    f"it gives {str(tensor.dtype).removeprefix('torch.')}, which MegEngine computes as int32"
                )
            if reason is not None:
                return reason
        translate(writer, node, value_of)
    except UntranslatableError as error:
        return str(error)
    return None


def _stand_in(writer: NodeList, parent: fx.Node) -> Any:
    made = []
    leaves = _leaves(fake(parent))
    for index, tensor in enumerate(leaves):
        reason = unfit(tensor) if isinstance(tensor, Tensor) else "an operand that is no tensor"
        if reason is not None:
            raise UntranslatableError(reason)
        value = Value(f"{parent.name}_{index}", tuple(tensor.shape), tensor.dtype)
        if parent.op in ("placeholder", "get_attr"):
            writer.inputs.append((value.name, value.shape, ""))
        made.append(value)
    return made if isinstance(fake(parent), (list, tuple)) else made[0]


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
