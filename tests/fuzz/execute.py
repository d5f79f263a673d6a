"""Running a program: as it stands, through a door of dlinfer, or step by step with another rounding."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

import dlinfer
import dlinfer.ops
from dlinfer.vendor import discovery
from tests.fuzz import memory, opaque, states
from tests.fuzz.program import Call, Input, Program, Step

Forward = Callable[[Mapping[str, Any]], tuple[torch.Tensor, ...]]
KEPT = ("buffer", "weight")


@dataclass
class CallTrace:
    """What a caller can see after one call. Tensors are copies, ``results`` are those of all calls so far.

    aliases: pairs of a result of this call and a tensor (``result 1``, the name of an input) that share elements.
    written: names of the memory whose version counters moved. structure: what the results stood in.
    error: what was raised; then the rest says only how memory outside of all views was left.
    """

    results: list[torch.Tensor] = field(default_factory=list)
    storages: dict[str, torch.Tensor] = field(default_factory=dict)
    strides: list[tuple[int, ...]] = field(default_factory=list)
    aliases: set[tuple[int, str]] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    structure: str = ""
    guards: dict[str, torch.Tensor] = field(default_factory=dict)
    error: BaseException | None = None


def namespace() -> dict[str, Any]:
    """The global names of a program's lines."""
    return {"torch": torch, "F": F, "dlinfer": dlinfer}


_FLOAT_NAMES = re.compile(r"torch\.(float32|float16|bfloat16)\b|\.float\(\)")


def run_step(step: Step, values: Mapping[str, Any], names: dict[str, Any], widen: bool = False) -> Any:
    """What a step's expression gives; None for a statement."""
    text = step.text.format(*step.uses)
    if widen:
        text = _FLOAT_NAMES.sub(lambda found: ".double()" if found[0][0] == "." else "torch.float64", text)
    scope = dict(values)
    if step.makes:
        return eval(compile(text, "<step>", "eval"), names, scope)
    exec(compile(text, "<step>", "exec"), names, scope)
    return None


def source(program: Program) -> str:
    """The program as a module class."""
    kept = [one.name for one in program.of_role(*KEPT)]
    given = [one.name for one in program.of_role("argument")]
    arguments = ", ".join(["self", *given, *program.calls[0].numbers])
    lines = [f"{name} = self.{name}" for name in kept] + [step.line for step in program.steps]
    results = program.returns[0] if program.door == "direct" else nested(program)
    body = "".join(f"        {line}\n" for line in [*lines, f"return {results}"])
    guard = "    @torch.no_grad()\n" if program.gradients else ""
    return f"class Model(torch.nn.Module):\n{guard}    def forward({arguments}):\n{body}"


def nested(program: Program) -> str:
    """The expression of the results."""
    names = program.returns
    listed = "".join(f"{name}, " for name in names).rstrip()
    return {
        "": f"({listed})",
        "none": f"(None, {listed} None)",
        "number": f"(3, {listed} 2.5, True)",
        "dict": "{" + ", ".join(f"'r{i}': {name}" for i, name in enumerate(names)) + ", 'none': None}",
        "nested": f"{{'a': [{names[0]}, None], 'b': ({' '.join(f'{name},' for name in names[1:])} {{'c': 3}})}}",
    }[program.nest]


_numbers = itertools.count()


def module(program: Program, widen: bool = False) -> tuple[torch.nn.Module, dict[str, memory.Storage]]:
    """(the program as a module, the memory of what it keeps)."""
    names = namespace()
    exec(compile(source(program), f"<fuzz {next(_numbers)}>", "exec"), names)
    model = names["Model"]()
    storages, tensors = memory.make(program, 0, KEPT, widen)
    for one in program.of_role(*KEPT):
        if one.role == "weight":
            model.register_parameter(
                one.name, torch.nn.Parameter(tensors[one.name], requires_grad=gradients(program, one, widen))
            )
        else:
            model.register_buffer(one.name, tensors[one.name])
    return model.eval(), storages


def gradients(program: Program, one: Input, widen: bool = False) -> bool:
    """Whether a weight records gradients."""
    return program.gradients and getattr(torch, one.dtype).is_floating_point


class Results(tuple):
    """The tensors of a result, and what they stood in."""

    structure = ""


def flat(made: Any) -> Results:
    """The tensors in a result of any structure."""
    leaves, spec = tree_flatten(made)
    results = Results(one for one in leaves if isinstance(one, torch.Tensor))
    others = ["tensor" if isinstance(one, torch.Tensor) else repr(one) for one in leaves]
    results.structure = f"{spec} of {others}"
    return results


def plain(model: Callable[..., Any]) -> Forward:
    """The model itself."""
    return lambda arguments: flat(model(**arguments))


def interpreted(
    program: Program, model: torch.nn.Module, widen: bool = False, make: Callable[..., Any] = run_step
) -> Forward:
    """The program step by step, its floats in float64 (``widen``), or each step as ``make`` runs it."""
    names = namespace()

    def forward(arguments: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values: dict[str, Any] = dict(arguments)
        values |= {one.name: getattr(model, one.name) for one in program.of_role(*KEPT)}
        for step in program.steps:
            made = make(step, values, names, widen)
            if step.makes:
                values[step.makes] = made
        return tuple(values[name] for name in program.returns)

    return torch.no_grad()(forward) if program.gradients else forward


def calls(
    program: Program,
    forward: Forward,
    kept: Mapping[str, memory.Storage],
    widen: bool = False,
    watch: bool = True,
) -> list[CallTrace]:
    """Make the program's calls, up to the first that raises. ``watch`` False leaves kept memory and aliases out."""
    traces: list[CallTrace] = []
    alive: list[torch.Tensor] = []
    previous: tuple[torch.Tensor, ...] = ()
    opaque.reset()
    for number, call in enumerate(program.calls):
        storages, arguments = memory.make(program, number, ("argument",), widen)
        for name, index in call.feed.items():
            if index < len(previous) and name in arguments:
                arguments[name] = previous[index]
        if call.data:
            kept[call.data].memory.data.mul_(0.5)
        trace = CallTrace()
        traces.append(trace)
        seen = {**(kept if watch else {}), **storages}
        before = {name: one.memory[~one.covered].clone() for name, one in seen.items()}
        versions = {name: one.memory._version for name, one in seen.items()}
        try:
            with torch.no_grad(), circumstances(call):
                results = forward({**arguments, **call.numbers})
        except Exception as cause:  # noqa: BLE001 - whatever is raised is compared
            trace.error = cause
            trace.guards = {
                name: one.memory[~one.covered]
                for name, one in seen.items()
                if not same_bits(one.memory[~one.covered], before[name])
            }
            return traces
        if watch:
            known = {**arguments, **{f"kept {n}": one.memory for n, one in kept.items()}}
            known |= {f"result {i}": one for i, one in enumerate(results)}
            trace.aliases = {
                (i, name)
                for i, one in enumerate(results)
                for name, other in known.items()
                if name != f"result {i}" and overlap(one, other)
            }
        trace.strides = [one.stride() for one in results]
        trace.structure = getattr(results, "structure", "")
        trace.written = {name for name, one in seen.items() if one.memory._version != versions[name]}
        if 0 <= call.write < len(results):
            write_into(results[call.write])
        alive += results
        previous = results
        trace.results = [one.detach().clone() for one in alive]
        trace.storages = {name: one.memory.clone() for name, one in seen.items()}
        if assigned(program) and watch:
            trace.storages |= {f"{name} afterwards": one.detach().clone() for name, one in arguments.items()}
    return traces


def assigned(program: Program) -> bool:
    """Whether a program replaces what a tensor object refers to."""
    return any("data assigned" in step.features for step in program.steps)


def write_into(result: torch.Tensor) -> None:
    """What a caller does with a result: it writes into it, if it may."""
    with contextlib.suppress(RuntimeError):  # an expanded one takes no write
        result.logical_not_() if result.dtype == torch.bool else result.fill_(5)


@contextlib.contextmanager
def circumstances(call: Call) -> Iterator[None]:
    """The attention backends and the vendor of a call."""
    if call.vendor:
        dlinfer.vendor.use(call.vendor)
    backends = [getattr(SDPBackend, call.sdpa), SDPBackend.MATH] if call.sdpa else []
    with sdpa_kernel(backends) if backends else contextlib.nullcontext(), states.entered(call.state):
        yield


@contextlib.contextmanager
def vendor_kept() -> Iterator[None]:
    """Afterwards the vendor of the CPU is what it was."""
    before = discovery.activate_default("cpu")
    try:
        yield
    finally:
        if before is not None:
            dlinfer.vendor.use(before.name)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share an element."""
    if (
        one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
        or not one.numel()
        or not other.numel()
    ):
        return False
    if (
        not one.untyped_storage().nbytes()
        or one.dtype != other.dtype
        or max(one.numel(), other.numel()) > 65536
    ):
        return one.untyped_storage().nbytes() > 0
    return not _places(one).isdisjoint(_places(other))


def _places(tensor: torch.Tensor) -> set[int]:
    end = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    places = torch.arange(end).as_strided(tensor.size(), tensor.stride()).reshape(-1)
    return {place + int(tensor.storage_offset()) for place in places.tolist()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, NaN with NaN."""
    return torch.equal(one, other) or torch.equal(
        one.nan_to_num(3.25) if one.is_floating_point() else one,
        other.nan_to_num(3.25) if other.is_floating_point() else other,
    )
