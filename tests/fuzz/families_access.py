"""Steps that move, view and write elements."""

import torch

from tests.fuzz.generate import Draft, alternatives
from tests.fuzz.program import Step

_VIEWS = alternatives("""
{0}.transpose({d}, {e})|{0}.permute(*range({0}.dim())[::-1])|{0}.unsqueeze({d})|{0}.squeeze()
{0}.squeeze({d})|{0}.reshape(-1)|{0}.flatten()|{0}.select({d}, 0)|{0}.select({d}, -1)
{0}.narrow({d}, 1, 1)|{0}.narrow({d}, 0, {0}.shape[{d}])|{0}[1:]|{0}[:-1]|{0}[::2]|{0}[..., 1:]
{0}[..., :2]|{0}[..., 0]|{0}[0]|{0}[-1]|{0}[None]|{0}[..., None]|{0}[:, 1:3]|{0}.unfold({d}, 2, 1)
{0}.unfold({d}, 1, 2)|{0}.diagonal()|{0}.expand(2, *{0}.shape)|{0}.unsqueeze(0).expand(3, *{0}.shape)
{0}.chunk(2, {d})[0]|{0}.chunk(2, {d})[-1]|{0}.split(1, {d})[-1]|{0}.movedim({d}, 0)|{0}.mT
{0}.view({0}.shape)|{0}.detach()|{0}.unbind({d})[0]|{0}.view(-1, {0}.shape[-1])
{0}.reshape({0}.shape[0], -1)|{0}.as_strided((2, 2), (1, 1))|{0}.t()
{0}.as_strided((2,), (1,), {0}.storage_offset() + 1)|{0}.as_strided({0}.shape, {0}.stride())
{0}.swapaxes(0, {d})|{0}.broadcast_to(2, *{0}.shape)|{0}.tensor_split(2, {d})[0]
{0}.unflatten({d}, (1, -1))|{0}[:]
""")

_PLACED = alternatives("""
{0}.add_({1})|{0}.mul_({1})|{0}.sub_({1})|{0}.copy_({1})|{0}.div_({1})|{0}[:1] = {1}|{0}[...] = {1}
{0}[..., :1] += {1}|{0}.lerp_({1}, 0.5)|{0}.addcmul_({1}, {1})|{0}[::2] = {1}|{0}.maximum({1}).add_(1)
""")

_ALONE = alternatives("""
{0}.zero_()|{0}.fill_(3)|{0}.neg_()|{0}.sin_()|{0}.relu_()|{0}.clamp_(-1, 1)|{0}.mul_(2)|{0}.add_(1)
{0}.sigmoid_()|{0}.masked_fill_({0} > 0, 5)|{0}[0] = 4|{0}[-1] += 2|{0}[1:].add_(1)|{0}.t().mul_(2)
{0}.transpose(0, -1).add_(3)|{0}[..., 0].zero_()|{0}.reshape(-1)[:2].fill_(9)|{0}.view(-1)[1:].mul_(-1)
{0}.exp_()|{0}.tanh_()|{0}.select(-1, 0).copy_({0}.select(-1, -1))|{0}[1:] = {0}[:-1].clone()|{0}[:-1] = {0}[1:].clone()
{0}.copy_({0}.flip(0))|{0}.add_({0}.sum())|{0}.cumsum_(0)|{0}[{0} > 0] = 0|{0}.copy_({0}.cumsum(0))
{0}.mul_({0}[:1].clone())|{0}.diagonal().fill_(1)|{0}.unsqueeze(0).add_(1)|{0}.squeeze_()|{0}.round_()
""")


def view(g: Draft) -> Step:
    """A view, or what may be one."""
    name = g.anything(1)
    text = g.choose(*_VIEWS).replace("{d}", str(g.dim(name))).replace("{e}", str(g.dim(name)))
    return Step(g.name(), text, (name,), features=("view",))


def write(g: Draft) -> Step:
    """A write into memory: an input's, a buffer's, an intermediate's or a view's."""
    fits = g.pick(lambda v: v.dtype != torch.bool and v.dim() > 0)
    name = fits or g.new_input(g.shape(1), role="buffer")
    if g.chance(0.3):
        name = g.pick(lambda v: v.dim() > 0 and v.dtype != torch.bool and g.random.random() < 0.5) or name
    if g.chance(0.5):
        return Step("", g.choose(*_ALONE), (name,), rounds=True, features=("write",))
    other = g.beside(name)
    text = g.choose(*_PLACED)
    if isinstance(other, str):
        return Step("", text, (name, other), rounds=True, features=("write",))
    return Step("", text.replace("{1}", str(other)), (name,), rounds=True, features=("write",))


def write_kept(g: Draft) -> Step:
    """A write whose result is used on: ``y = x.add_(1)``."""
    name = g.floats(1)
    return Step(
        g.name(),
        g.choose("{0}.add_(1)", "{0}.mul_(0.5)", "{0}[:].add_(2)", "{0}.relu_()"),
        (name,),
        True,
        ("write",),
    )


def _index(g: Draft, size: int, shape: tuple[str | int, ...], content: str = "index") -> str:
    """A new tensor of indices below a size; seldom one that lies outside already at the first call."""
    kind = "beyond" if g.chance(0.08) else content
    return g.new_input(
        shape, g.choose("int64", "int64", "int32"), content=kind, bound=size, role="argument", alias=()
    )


def gathering(g: Draft) -> Step | None:
    """Elements by their indices."""
    name = g.anything(1)
    value = g.values[name]
    dim = g.dim(name)
    size = value.shape[dim]
    way = g.choose("select", "index", "gather", "two", "along", "embedding", "take", "computed")
    if way == "select":
        return Step(
            g.name(), f"{{0}}.index_select({dim}, {{1}})", (name, _index(g, size, (g.choose("A", "B", 3),)))
        )
    if way == "index":
        return Step(
            g.name(),
            g.choose("{0}[{1}]", "{0}[{1}] * 2"),
            (name, _index(g, value.shape[0], g.choose(("A",), (2, 3), ()))),
        )
    if way in ("gather", "along"):
        text = (
            f"{{0}}.gather({dim}, {{1}})" if way == "gather" else f"torch.take_along_dim({{0}}, {{1}}, {dim})"
        )
        return Step(g.name(), text, (name, _index(g, size, tuple(value.shape))))
    if way == "two" and value.dim() > 1:
        first, second = (
            _index(g, value.shape[0], (3,), g.choose("index", "index", "beyond")),
            _index(g, value.shape[1], g.choose((3,), (1,), (2, 3)), g.choose("index", "index", "beyond")),
        )
        return Step(
            g.name(),
            g.choose("{0}[{1}, {2}]", "{0}[{1}, {2}] + 1", "{0}[{1}, ..., {2}]"),
            (name, first, second),
        )
    if way == "embedding":
        table = g.new_input((g.choose(5, 8), g.choose(4, "C")), role=g.choose("weight", "argument"))
        return Step(
            g.name(),
            "F.embedding({1}, {0})",
            (table, _index(g, g.values[table].shape[0], g.choose(("A",), ("A", 2)))),
        )
    if way == "computed":  # an index that the program computes
        return Step(
            g.name(),
            g.choose("{0}[{1} + 1]", "{0}[{1} // 1]", "{0}[torch.clamp({1}, 0) * 1]"),
            (name, _index(g, value.shape[0], ("A",))),
        )
    return Step(g.name(), "{0}.take({1})", (name, _index(g, value.numel(), (3,))))


def scattering(g: Draft) -> Step | None:
    """Writes by indices; those whose order would matter get distinct ones."""
    name = g.pick(lambda v: v.dim() > 0 and v.dtype != torch.bool) or g.floats(1)
    value = g.values[name]
    dim = g.dim(name)
    size, kind = value.shape[dim], str(value.dtype).removeprefix("torch.")
    way = g.choose("copy", "add", "put", "scatter", "scatter_add", "two", "fill", "functional", "reduce")
    count = min(size, 3)
    shape = [*value.shape]
    shape[dim] = count
    distinct = _index(g, size, (count,), "slots")
    if way == "copy":
        return Step(
            "",
            f"{{0}}.index_copy_({dim}, {{1}}, {{2}})",
            (name, distinct, g.new_input(shape, kind)),
            features=("write",),
        )
    if way == "add":
        return Step(
            "",
            f"{{0}}.index_add_({dim}, {{1}}, {{2}})",
            (name, distinct, g.new_input(shape, kind)),
            True,
            ("write",),
        )
    if way == "fill":
        return Step("", f"{{0}}.index_fill_({dim}, {{1}}, 3)", (name, distinct), features=("write",))
    if way == "put":
        first = _index(g, value.shape[0], (min(value.shape[0], 3),), "slots")
        other = g.new_input((g.values[first].shape[0], *value.shape[1:]), kind)
        return Step(
            "",
            g.choose("{0}[{1}] = {2}", "{0}.index_put_(({1},), {2}, accumulate=True)"),
            (name, first, other),
            True,
            ("write",),
        )
    if way == "two" and value.dim() > 1:
        first = _index(g, value.shape[0], (min(value.shape[0], 3),), "slots")
        second = _index(g, value.shape[1], (1,))
        return Step(
            "", g.choose("{0}[{1}, {2}] = 7", "{0}[{1}, {2}] += 1"), (name, first, second), True, ("write",)
        )
    index = _index(g, size, tuple(value.shape), "same" if size > 2 else "index")
    source = g.new_input(value.shape, kind)
    if way == "functional":
        return Step(g.name(), f"{{0}}.scatter_add({dim}, {{1}}, {{2}})", (name, index, source), True)
    if way == "reduce":
        return Step(
            g.name(), f"{{0}}.scatter_reduce({dim}, {{1}}, {{2}}, 'amax')", (name, index, source), True
        )
    if way == "scatter":
        return Step("", f"{{0}}.scatter_({dim}, {{1}}, 3)", (name, index), features=("write",))
    return Step("", f"{{0}}.scatter_add_({dim}, {{1}}, {{2}})", (name, index, source), True, ("write",))


def state(g: Draft) -> Step:
    """A buffer that follows the arguments: written from a value of its shape, or grown by it."""
    name = g.floats(1)
    value = g.values[name]
    buffer = g.new_input(
        value.shape, str(value.dtype).removeprefix("torch."), role="buffer", content="normal"
    )
    text = g.choose(
        "{0}.copy_({1})",
        "{0}.add_({1})",
        "{0}.copy_(torch.cumsum({1}, 0))",
        "{0}[:1].copy_({1}[:1])",
        "{0}.mul_(0.5).add_({1})",
    )
    return Step("", text, (buffer, name), rounds=True, features=("write",))


def two_names(g: Draft) -> Step:
    """A write into memory by one name, and a result of what another name shows of it."""
    role = g.choose("buffer", "argument")
    one = g.new_input(g.shape(1), "float32", role=role, layout=g.choose("plain", "guarded"), alias=())
    alias = (one, g.choose("same", "same", "view", "shift"))
    other = g.new_input(g.input(one).shape, "float32", role=role, alias=alias)
    text = g.choose(
        "{0}.mul_(2) + {1}", "{0}.add_({1}) * {1}", "{1}.sin() - {0}.neg_()", "{0}[:1].fill_(3) + {1}"
    )
    return Step(g.name(), text, (one, other), rounds=True, features=("write",))


DRAWN = {view: 14, write: 10, write_kept: 2, gathering: 6, scattering: 5, state: 3, two_names: 1.5}
