"""A program as a script that needs torch and dlinfer only, and shows how compiled differs from eager."""

import inspect
import itertools
from typing import Any

import torch

from tests.fuzz import memory, opaque, states
from tests.fuzz.execute import KEPT, gradients, source
from tests.fuzz.program import Call, Program

_HEAD = '''"""{title}

{why}
Run it as it stands: it prints what differs and ends with 1.
"""

import contextlib
import sys
import tempfile
from math import inf, nan

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dlinfer
import dlinfer.ops

'''

_TAIL = '''
def run(forward_of, model, fixed=False):
    """What a caller sees after each call. ``fixed``: all calls run in the global state of the first."""
    forward, seen, previous = forward_of(model), [], ()
    for make, feed, backends, vendor, write, state, data in CALLS:
        storages, arguments = make()
        state = CALLS[0][5] if fixed else state
        versions = {name: one._version for name, one in storages.items()}
        if data:
            getattr(model, data).data.mul_(0.5)
        arguments |= {name: previous[index] for name, index in feed.items()}
        if vendor:
            dlinfer.vendor.use(vendor)
        try:
            with torch.no_grad(), sdpa_kernel(backends) if backends else contextlib.nullcontext(), entered(state):
                previous, structure = flat(forward(arguments))
        except Exception as error:
            return [*seen, ("error", type(error).__name__, str(error)[:300])]
        if write >= 0:
            with contextlib.suppress(RuntimeError):
                previous[write].fill_(5)
        seen += [("result", index, one.clone()) for index, one in enumerate(previous)]
        seen += [("memory of argument", name, one.clone()) for name, one in storages.items()]
        seen += [("argument", name, one.clone()) for name, one in arguments.items() if isinstance(one, torch.Tensor)]
        if WATCHED:
            seen += [("structure", "results", structure)]
            seen += [("written", name, one._version > versions[name]) for name, one in storages.items()]
        seen += [("buffer", name, one.clone()) for name, one in model.state_dict().items()] if WATCHED else []
    return seen


def close(one, other):
    if not isinstance(one, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return isinstance(one, str) and isinstance(other, str)
    if not one.is_floating_point():
        return torch.equal(one, other)
    step = 8 * torch.finfo(one.dtype).eps
    return torch.allclose(one.double(), other.double(), rtol=step, atol=1e-37, equal_nan=True)


def same(want, got):
    """Which error it is does not matter; strides do."""
    if "error" in (want[0], got[0]):
        return want[0] == got[0]
    if want[0] == "written":
        return want[2] <= got[2]
    if want[0] == "structure":
        return want[2] == got[2]
    return close(want[2], got[2]) and (want[0] != "result" or want[2].stride() == got[2].stride())


if __name__ == "__main__":
    before = dlinfer.vendor.activate_default("cpu").name
    expected = run(eagerly, new_model(), FIXED)
    dlinfer.vendor.use(before)
    given = run(compiled, new_model())
    wrong = [(want, got) for want, got in zip(expected, given) if not same(want, got)]
    for want, got in wrong:
        print("eager   ", *want)
        print("compiled", *got)
    print(f"{len(wrong)} of {len(expected)} differ")
    sys.exit(bool(wrong))
'''

_FLAT = """
def flat(made):
    leaves, spec = torch.utils._pytree.tree_flatten(made)
    tensors = tuple(one for one in leaves if isinstance(one, torch.Tensor))
    return tensors, f"{spec} of {['tensor' if isinstance(one, torch.Tensor) else one for one in leaves]}"


def contiguous(one):
    return one.contiguous() if isinstance(one, torch.Tensor) else one

"""

_DOORS = {
    "compile": """    run = torch.compile(model, backend="dlinfer", dynamic={dynamic}, options={options})
    return lambda given: run(**given)
""",
    "direct": """    from dlinfer.graph.bound_call.capture import capture_call
    from dlinfer.graph.options import CompileOptions
    from dlinfer.graph.torch_private.dynamo import mark_unbacked

    made = []

    def run(given):
        for name, dim, size in {named}:
            mark_unbacked(given[name], dim, size)
        if made:
            return made[0](**given)
        call, result = capture_call(model, dict(given), steady=(), options=CompileOptions.of({options}))
        made.append(call)
        return result

    return run
""",
    "artifact": """    example = {{name: one.clone() for name, one in CALLS[0][0]()[1].items()}}
    artifact = dlinfer.compile(model, (), example, dynamic_shapes={shapes}, options={options})
    return lambda given: artifact(**given)
""",
    "loaded": """    example = {{name: one.clone() for name, one in CALLS[0][0]()[1].items()}}
    artifact = dlinfer.compile(model, (), example, dynamic_shapes={shapes}, options={options})
    path = tempfile.mkdtemp() + "/program.dlinfer"
    artifact.save(path)
    session = dlinfer.load(path)
    return lambda given: session.run(given)
""",
}


def script(program: Program, engine: str, why: str) -> str:
    """The script's text. ``why``: what differed, in words."""
    title = f"Found by the fuzzer: engine {engine}, seed {program.seed}."
    text = _HEAD.format(title=title, why=why.replace("\\", "/").replace('"""', "'''"))
    text += _FLAT + "\n" + _code_of(states.entered)
    if any("opaque" in step.features for step in program.steps):
        text += _code_of(opaque)
    text += source(program) + "\n\n" + _new_model(program)
    text += "\n\n" + "\n\n".join(_call(program, number) for number in range(len(program.calls)))
    rows = "".join(f"    (call_{number}, {_row(call)}),\n" for number, call in enumerate(program.calls))
    text += f"\n\nCALLS = (\n{rows})\nWATCHED = {program.door != 'loaded'}\n"
    text += f"FIXED = {program.door in ('artifact', 'loaded')}\n\n\n"
    options = repr({"engine": engine, "fallback": "allow", "small_regions": "engine"})
    named = [
        (one.name, dim, size)
        for one in program.of_role("argument")
        for dim, size in enumerate(one.shape)
        if isinstance(size, str)
    ]
    text += "def compiled(model):\n" + _DOORS[program.door].format(
        dynamic=program.dynamic, options=options, named=named, shapes=_shapes(program)
    )
    text += "\n\n"
    # A bound call's results are laid out as for contiguous arguments.
    read = "contiguous(one)" if program.door == "direct" else "one"
    text += "def eagerly(model):\n"
    text += f"    return lambda given: model(**{{name: {read} for name, one in given.items()}})\n\n"
    return text + (_threads() if program.threads else "") + _TAIL


def _code_of(thing: Any) -> str:
    """The source of a module or function, without imports."""
    lines = inspect.getsource(thing).splitlines()
    kept = [line for line in lines if not line.startswith(("import ", "from "))]
    return "\n".join(kept).replace("-> Iterator[None]", "").strip() + "\n\n\n"


def _threads() -> str:
    return "# Two threads made these calls at the same time when this was found; here it is one.\n\n"


def _row(call: Call) -> str:
    backends = f"[SDPBackend.{call.sdpa}, SDPBackend.MATH]" if call.sdpa else "[]"
    return f"{call.feed!r}, {backends}, {call.vendor!r}, {call.write}, {call.state!r}, {call.data!r}"


def _shapes(program: Program) -> str:
    rows = []
    for one in program.of_role("argument"):
        named = [dim for dim, size in enumerate(one.shape) if isinstance(size, str)]
        given = ", ".join(f"{dim}: torch.export.Dim.AUTO" for dim in named if program.dynamic is not False)
        rows.append(f"{one.name!r}: {{{given}}}")
    return "{" + ", ".join(rows) + "}"


def _new_model(program: Program) -> str:
    lines = ["def new_model():", "    model = Model()"]
    lines += _tensors(program, 0, KEPT)
    for one in program.of_role(*KEPT):
        if one.role == "weight":
            recorded = gradients(program, one)
            lines.append(f"    model.{one.name} = torch.nn.Parameter({one.name}, requires_grad={recorded})")
        else:
            lines.append(f"    model.register_buffer({one.name!r}, {one.name})")
    return "\n".join([*lines, "    return model.eval()"])


def _call(program: Program, number: int) -> str:
    lines = [f"def call_{number}():", *_tensors(program, number, ("argument",))]
    views = memory.plan(program, program.calls[number], ("argument",))
    storages = dict.fromkeys(view.storage for view in views.values())
    owned = ", ".join(f"{name}=memory_{name}" for name in storages)
    numbers = [f"{name}={number!r}" for name, number in program.calls[number].numbers.items()]
    arguments = ", ".join([*(f"{name}={name}" for name in views), *numbers])
    return "\n".join([*lines, f"    return dict({owned}), dict({arguments})"])


def _tensors(program: Program, number: int, roles: tuple[str, ...]) -> list[str]:
    storages, _ = memory.make(program, number, roles)
    lines = [f"    memory_{name} = {_literal(one.memory)}" for name, one in storages.items()]
    for name, view in memory.plan(program, program.calls[number], roles).items():
        if view.same_as:
            lines.append(f"    {name} = {view.same_as}")
        else:
            cast = f".view(torch.{view.dtype})" if view.dtype else ""
            text = f"memory_{view.storage}{cast}.as_strided({view.size}, {view.stride}, {view.offset})"
            lines.append(f"    {name} = {f'torch._neg_view({text})' if view.negated else text}")
    return lines


def _literal(flat: torch.Tensor) -> str:
    """A flat tensor as an expression of the same bits."""
    values: list[Any] = flat.tolist()
    runs = [(value, len(list(alike))) for value, alike in itertools.groupby(values, repr)]
    if len(values) > 4 and len(runs) == 1:
        return f"torch.full(({len(values)},), {runs[0][0]}, dtype={flat.dtype})"
    if len(values) > 16 and len(runs) <= len(values) // 4:
        parts = " + ".join(f"{count} * [{value}]" for value, count in runs)
        return f"torch.tensor({parts}, dtype={flat.dtype})"
    return f"torch.tensor({values!r}, dtype={flat.dtype})"
