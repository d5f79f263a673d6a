"""Steps with effects that a graph does not show: custom ops, ``.data``, numbers of the caller, memory of two dtypes."""

from dataclasses import replace

import torch

from tests.fuzz.generate import Draft, alternatives
from tests.fuzz.program import Step

_SCALED = alternatives("""
{0} * {1}|{0} / {1}|{0} + {1}|F.softmax({0} / {1}, -1)|({0} * 2 + {1}).sin()|{0} * ({1} * 2 + 1)|{0} - {1} ** 2
({0} > {1}) & ({0} != 0)
""")

# Each value of the number is another graph: a branch, and parameters of ops that take no tensor.
_VALUED = alternatives("""
({0} if {1} > 1 else {0} * 2)|{0}.add({0}, alpha={1})|torch.full_like({0}, {1})|{0}.clamp(max={1})
F.layer_norm({0}, {0}.shape[-1:], eps={1})|torch.where({0} > {1}, {0}, {1})
""")


def number(g: Draft) -> Step:
    """Arithmetic with a Python float that the caller chooses at each call."""
    valued = g.chance(0.3)
    text = g.choose(*(_VALUED if valued else _SCALED))
    features = ("number", "value of a number") if valued else ("number",)
    return Step(g.name(), text, (g.floats(1), g.new_number()), rounds=True, features=features)


def opaque(g: Draft) -> Step:
    """A custom op whose effects its schema does not tell, or whose fake function is wrong."""
    name = g.floats(1)
    way = g.choose("count", "count", "count", "note", "overwrite", "moved", "fewer", "wider")
    if way == "note":
        return Step("", "torch.ops.fuzz.note({0})", (name,), features=("opaque",))
    if way == "overwrite":
        return Step("", "torch.ops.fuzz.overwrite({0})", (name,), features=("opaque", "write"))
    after = g.choose("", "", " * 2 + 1", ".sin()")
    text = f"torch.ops.fuzz.{way}({{0}}){after}"
    if way == "count" and g.chance(0.4):
        text = "torch.ops.fuzz.count({0}) + torch.ops.fuzz.count({0})"
    wrong = ("wrong fake",) if way in ("fewer", "wider") else ()
    return Step(g.name(), text, (name,), features=("opaque", *wrong))


def data(g: Draft) -> Step:
    """A read, a write or an assignment of a tensor's ``.data``, which autograd and version counters do not see."""
    way = g.choose("read", "write", "assign", "assign")
    if way == "read":
        return Step(g.name(), "{0}.data * 2", (g.floats(1),), rounds=True, features=("data read",))
    shape = g.shape(1)
    name = g.new_input(shape, role=g.choose("buffer", "buffer", "argument"), layout="plain", alias=())
    if way == "write":
        text = g.choose("{0}.data.add_(1)", "{0}.data.mul_(0.5)", "{0}.data[:1] = 3")
        return Step("", text, (name,), rounds=True, features=("write", "data write"))
    return Step(
        "", "{0}.data = {0}.data * 0.5 + 1", (name,), rounds=True, features=("write", "data assigned")
    )


def arena(g: Draft) -> Step:
    """A mask or small integers that lie in memory of wider integers, which the same program writes."""
    role = g.choose("argument", "argument", "buffer")
    whole = g.new_input((4,), "int32", role=role, layout="plain", content="flags", alias=())
    kind = g.choose("bool", "bool", "uint8", "int16")
    count = 16 if kind != "int16" else 8
    part = g.new_input((count,), kind, role=role, layout="plain", content="normal", alias=(whole, "bytes"))
    # Other steps would write numbers into it that are no bools.
    del g.values[whole]
    after = {"bool": "~{1}", "uint8": "{1} + 1", "int16": "{1} * 2"}[kind]
    text = g.choose("({0}.zero_(), {a})[1]", "({a}, {0}.fill_(1))[0]", "({0}.copy_(1 - {0}), {a})[1]")
    step = Step(g.name(), text.replace("{a}", after), (whole, part), features=("write", "arena"))
    g.values[whole] = torch.zeros(4, dtype=torch.int32)
    kept = g.add(replace(step, features=("arena", *step.features)))
    del g.values[whole]
    if not kept:
        raise RuntimeError("a step of an arena does not run")
    return Step(g.name(), "{0}.sum()", (step.makes,))


DRAWN = {number: 3, opaque: 3, data: 2, arena: 2}
