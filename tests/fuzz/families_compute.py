"""Steps that compute new tensors: elementwise ops, comparisons, reductions, norms and products."""

from tests.fuzz.generate import FLOATS, INTEGERS, Draft, alternatives
from tests.fuzz.program import Step

_UNARY = """sin cos exp log sqrt rsqrt tanh sigmoid erf erfc neg abs exp2 expm1 log1p log2 log10 reciprocal square
sinh cosh atan asin acos asinh tan relu isnan isinf isfinite floor ceil round trunc frac sign nan_to_num sgn
digamma lgamma logit""".split()

_ACTIVATIONS = alternatives("""
F.gelu({0})|F.gelu({0}, approximate='tanh')|F.silu({0})|F.softplus({0})|F.softplus({0}, beta=2.0, threshold=5.0)
F.logsigmoid({0})|F.elu({0})|F.elu({0}, alpha=0.5)|F.celu({0}, alpha=2.0)|F.selu({0})|F.mish({0})
F.hardswish({0})|F.hardsigmoid({0})|F.hardtanh({0}, -2.0, 3.0)|F.relu6({0})|F.leaky_relu({0}, 0.2)
F.softsign({0})|F.tanhshrink({0})|F.hardshrink({0})|F.softshrink({0})|F.threshold({0}, 0.5, -1.0)
""")

_BINARY = alternatives("""
{0} + {1}|{0} - {1}|{0} * {1}|{0} / {1}|{1} - {0}|{1} / {0}|torch.maximum({0}, torch.as_tensor({1}))
torch.minimum({0}, torch.as_tensor({1}))|{0} // {1}|{0} % {1}|torch.fmod({0}, {1})
torch.atan2({0}, torch.as_tensor({1}))|torch.hypot({0}, torch.as_tensor({1}))
torch.fmax({0}, torch.as_tensor({1}))|torch.fmin({0}, torch.as_tensor({1}))
torch.copysign({0}, torch.nan_to_num(torch.as_tensor({1})))
torch.signbit(torch.nan_to_num({0}))
torch.pow({0}, 2)|torch.pow({0}, 3)|torch.pow({0}, 0.5)|torch.pow({0}, -1)|torch.rsub({0}, {1})
torch.add({0}, {1}, alpha=2)|torch.div({0}, {1}, rounding_mode='floor')
torch.div({0}, {1}, rounding_mode='trunc')|torch.addcmul({0}, {0}, torch.as_tensor({1}), value=0.5)
torch.lerp({0}, {0}.neg(), 0.25)|torch.logaddexp({0}, {0} * {1})|torch.xlogy({0}, {1})
torch.float_power({0}, 2)|{0}.abs() ** {1}
""")

# The least number of a type divided by -1 ends the process in eager mode (SIGFPE), hence what is halved before.
_INTEGER = alternatives("""
{0} & {1}|torch.bitwise_or({0}, {1})|{0} ^ {1}|~{0}|-{0}|abs({0})|{0}.sign()|{0} << 1|{0} >> 1|{0}.clamp(-5, 100)
{0} + 1|{0} * {0}|({0} >> 1) // {1}|({0} >> 1) % {1}|torch.fmod({0} >> 1, {1})|{0} / {1}|{0} + {1}|{0} * {1}
{0} - {1}|torch.maximum({0}, torch.as_tensor({1}))|{0}.bool()|{0}.float()|{0}.double()|{0}.square()
torch.div({0} >> 1, {1}, rounding_mode='trunc')|{0} // 3|{0} // -7|{0} % 5|{0} % -3|torch.fmod({0}, 2)
""")

_REDUCED = alternatives("""
{0}.sum({d})|{0}.mean({d})|{0}.amax({d})|{0}.amin({d})|{0}.sum()|{0}.sum({d}, keepdim=True)
{0}.mean({d}, keepdim=True)|{0}.var({d})|{0}.std({d}, unbiased=False)|{0}.max({d})[0]|{0}.min({d})[0]
{0}.max()|{0}.min()|{0}.norm(dim={d})|{0}.logsumexp({d})|{0}.prod({d})|{0}.any({d})|{0}.all({d})
{0}.cumsum({d})|{0}.sum({d}, dtype=torch.float64)|{0}.abs().sum({d})|torch.var_mean({0}, {d})[1]
{0}.nansum({d})|torch.count_nonzero({0}, {d})|{0}.aminmax(dim={d})[0]|{0}.cumprod({d})
{0}.sum(dim=(0, {d}))|{0}.median({d})[0]
""")

_PICKED = alternatives("""
{0}.argmax({d})|{0}.argmin({d}, keepdim=True)|{0}.argmax()|{0}.max({d})[1]|{0}.min({d})[1]
{0}.topk(1, {d})[0]|{0}.topk(2, {d})[0]|{0}.sort({d})[0]|{0}.sort({d}, descending=True, stable=True)[1]
{0}.argsort({d}, stable=True)|{0}.cummax({d})[0]
""")

_NORMED = alternatives("""
F.softmax({0}, {d})|F.log_softmax({0}, {d})|F.softmax({0}, {d}, dtype=torch.float32)|{0}.softmax(-1)
F.normalize({0}, dim={d})|F.layer_norm({0}, {0}.shape[-1:])|F.rms_norm({0}, {0}.shape[-1:])
F.rms_norm({0}, {0}.shape[-1:], eps=1e-6)|{0} * torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + 1e-6)
F.softmin({0}, {d})
""")

_MADE = alternatives("""
torch.zeros_like({0})|torch.full_like({0}, 3)|torch.ones_like({0}) * 2|torch.arange({0}.shape[{d}])
torch.arange({0}.numel(), dtype=torch.float32)|{0}.new_zeros({0}.shape)|torch.tril({0})
torch.triu({0}, 1)|torch.cat([{0}, {0}], {d})|torch.stack([{0}, {0}], {d})|{0}.repeat_interleave(2, {d})
{0}.flip({d})|{0}.roll(1, {d})|{0}.contiguous()|{0}.clone()|{0}.tile(2)|F.pad({0}, (1, 0))
F.pad({0}, (0, 2), value=1.0)|torch.tensor(2.0) * {0}|{0} * {0}.shape[{d}]|{0} / max({0}.numel(), 1)
({0} if {0}.shape[{d}] > 2 else {0} * 2)|torch.diff({0}, dim={d})|torch.linspace(0, 1, 5)
F.one_hot(torch.arange(3), 4)|torch.logical_not({0})|torch.eye(3)
""")

_COMPARED = "{0} > {1}|{0} < {1}|{0} >= {1}|{0} <= {1}|{0} == {1}|{0} != {1}".split("|")
_CHOSEN = alternatives("""
torch.where({0} {c} {1}, {0}, {1})|torch.where({0} {c} {1}, {0}, 0)|{0}.masked_fill({0} {c} {1}, 2)
({0} {c} {1}).sum()|({0} {c} {1}).sum(-1)|({0} {c} {1}) & ({0} != 0)
torch.logical_or({0} {c} {1}, {0} != {0})|({0} {c} {1}).any()|({0} {c} {1}).to(torch.float32)
({0} {c} {1}).cumsum(-1)|({0} {c} {1}).float().mean()
torch.isclose({0}, torch.as_tensor({1}, dtype={0}.dtype))|({0} {c} {1}) ^ ({0} > 0)
""")


def elementwise(g: Draft) -> Step:
    """A function of one tensor."""
    return Step(g.name(), "torch." + g.choose(*_UNARY) + "({0})", (g.floats(),), rounds=True)


def activation(g: Draft) -> Step:
    """An activation, half of the time on values where it saturates."""
    extreme = g.chance(0.4)
    name = g.new_input(g.shape(1), content="extreme") if extreme else g.floats()
    return Step(g.name(), g.choose(*_ACTIVATIONS), (name,), rounds=True)


def _two(g: Draft, one: str, text: str) -> Step:
    other = g.beside(one)
    if isinstance(other, str):
        return Step(g.name(), text, (one, other), rounds=True)
    return Step(g.name(), text.replace("{1}", str(other)), (one,), rounds=True)


def arithmetic(g: Draft) -> Step:
    """A function of two tensors, or of a tensor and a number."""
    return _two(g, g.floats(), g.choose(*_BINARY))


def whole_numbers(g: Draft) -> Step:
    """Arithmetic of integers."""
    return _two(g, g.integers(), g.choose(*_INTEGER))


def mixed_types(g: Draft) -> Step:
    """Arithmetic of operands of two dtypes."""
    one = g.anything()
    other = g.new_input((), g.choose(*FLOATS, *INTEGERS)) if g.chance(0.3) else g.anything()
    return Step(
        g.name(),
        g.choose("{0} + {1}", "{0} * {1}", "{0} > {1}", "torch.where({0} > 0, {0}, {1})"),
        (one, other),
        True,
    )


def cast(g: Draft) -> Step:
    """Another dtype; to whole numbers from within their range only, since C leaves the rest open."""
    name = g.anything()
    if g.values[name].is_floating_point() and g.chance(0.4):
        kind = g.choose("int32", "int64", "int8", "uint8", "bool")
        low = 0 if kind == "uint8" else -100
        return Step(g.name(), f"{{0}}.nan_to_num(1.0, 2.0, 3.0).clamp({low}, 100).to(torch.{kind})", (name,))
    return Step(
        g.name(),
        f"{{0}}.to(torch.{g.choose('float32', 'float32', 'float64', 'bfloat16', 'float16')})",
        (name,),
        True,
    )


def comparison(g: Draft) -> Step:
    """A comparison, or what is chosen by one."""
    name = g.anything() if g.chance(0.3) else g.floats()
    text = (
        g.choose(*_COMPARED)
        if g.chance(0.3)
        else g.choose(*_CHOSEN).replace("{c}", g.choose("<", ">", "<=", ">=", "==", "!="))
    )
    return _two(g, name, text)


def reduction(g: Draft) -> Step:
    """A reduction, or a running one."""
    name = g.anything(1) if g.chance(0.4) else g.floats(1)
    return Step(g.name(), g.choose(*_REDUCED).replace("{d}", str(g.dim(name))), (name,), rounds=True)


def selection_by_order(g: Draft) -> Step:
    """Places and values by size."""
    name = g.anything(1)
    return Step(g.name(), g.choose(*_PICKED).replace("{d}", str(g.dim(name))), (name,))


def norm(g: Draft) -> Step:
    """A softmax or a norm."""
    name = g.floats(1)
    return Step(g.name(), g.choose(*_NORMED).replace("{d}", str(g.dim(name))), (name,), rounds=True)


def creation(g: Draft) -> Step:
    """A new tensor of the sizes of another one."""
    name = g.anything(1)
    return Step(g.name(), g.choose(*_MADE).replace("{d}", str(g.dim(name))), (name,), rounds=True)


def product(g: Draft) -> Step:
    """A product of matrices."""
    name = g.floats(1)
    value = g.values[name]
    kind, inner = str(value.dtype).removeprefix("torch."), value.shape[-1]
    way = g.choose("linear", "matmul", "bmm", "einsum", "self")
    if way == "linear":
        weight = g.new_input(
            (g.choose(1, 4, 8, "C"), inner), kind, role=g.choose("weight", "argument", "buffer")
        )
        bias = g.new_input((g.values[weight].shape[0],), kind)
        return Step(g.name(), "F.linear({0}, {1}, {2})", (name, weight, bias), rounds=True)
    if way == "self" and value.dim() > 1:
        return Step(
            g.name(),
            g.choose("{0} @ {0}.mT", "{0}.mT @ {0}", "torch.matmul({0}, {0}.transpose(-1, -2)) * 0.5"),
            (name,),
            True,
        )
    if way == "bmm" and value.dim() == 3:
        other = g.new_input((value.shape[0], inner, 4), kind)
        return Step(
            g.name(),
            g.choose("torch.bmm({0}, {1})", "torch.baddbmm({0} @ {1}, {0}, {1})"),
            (name, other),
            rounds=True,
        )
    other = g.new_input((inner, g.choose(1, 4, "B")), kind)
    if way == "einsum" and value.dim() == 2:
        return Step(g.name(), "torch.einsum('ij,jk->ki', {0}, {1})", (name, other), rounds=True)
    return Step(g.name(), g.choose("{0} @ {1}", "torch.matmul({0}, {1})"), (name, other), rounds=True)


def convolution(g: Draft) -> Step:
    """A convolution or pooling; an image may have its channels last."""
    image = g.new_input((g.choose(1, 2), 3, g.choose(5, 8), g.choose(5, 6)), content="normal")
    if g.chance(0.3):
        return Step(
            g.name(),
            g.choose("F.max_pool2d({0}, 2)", "F.avg_pool2d({0}, 2)", "F.interpolate({0}, scale_factor=2.0)"),
            (image,),
            True,
        )
    weight = g.new_input((4, 3, 3, 3), role="weight", content="normal")
    last = ".to(memory_format=torch.channels_last)" if g.chance(0.5) else ""
    return Step(
        g.name(),
        f"F.conv2d({{0}}{last}, {{1}}, padding={g.choose(0, 1)}, stride={g.choose(1, 2)})",
        (image, weight),
        True,
    )


def counted_bools(g: Draft) -> Step:
    """A count of more trues than float32 can count; seldom, since it takes 17 MB."""
    counted = g.choose("sum()", "sum(-1)", "count_nonzero()")
    text = f"({{0}}.sum() == {{0}}.sum()).expand(2**24 + 5).{counted}"
    return Step(g.name(), text, (g.floats(),))


DRAWN = {
    elementwise: 8,
    activation: 4,
    arithmetic: 10,
    whole_numbers: 4,
    mixed_types: 2,
    cast: 4,
    comparison: 6,
    reduction: 7,
    selection_by_order: 2,
    norm: 4,
    creation: 4,
    product: 4,
    convolution: 0.7,
    counted_bools: 0.8,
}
