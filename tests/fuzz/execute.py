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

import dlinfer
import dlinfer.ops
from dlinfer.vendor import discovery
from tests.fuzz import memory
from tests.fuzz.program import Call, Program, Step

Forward = Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]]
KEPT = ("buffer", "weight")


@dataclass
class CallTrace:
    """What a caller can see after one call. Tensors are copies, ``results`` are those of all calls so far.

    aliases: pairs of a result of this call and a tensor (``result 1``, the name of an input) that share elements.
    error: what was raised; then the rest says only how memory outside of all views was left.
    """

    results: list[torch.Tensor] = field(default_factory=list)
    storages: dict[str, torch.Tensor] = field(default_factory=dict)
    strides: list[tuple[int, ...]] = field(default_factory=list)
    aliases: set[tuple[int, str]] = field(default_factory=set)
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
    arguments = ", ".join(["self", *(one.name for one in program.of_role("argument"))])
    lines = [f"{name} = self.{name}" for name in kept] + [step.line for step in program.steps]
    results = (
        program.returns[0]
        if program.door == "direct"
        else "(" + "".join(f"{name}, " for name in program.returns).rstrip() + ")"
    )
    body = "".join(f"        {line}\n" for line in [*lines, f"return {results}"])
    return f"class Model(torch.nn.Module):\n    def forward({arguments}):\n{body}"


_numbers = itertools.count()


def module(program: Program, widen: bool = False) -> tuple[torch.nn.Module, dict[str, memory.Storage]]:
    """(the program as a module, the memory of what it keeps)."""
    names = namespace()
    exec(compile(source(program), f"<fuzz {next(_numbers)}>", "exec"), names)
    model = names["Model"]()
    storages, tensors = memory.make(program, 0, KEPT, widen)
    for one in program.of_role(*KEPT):
        if one.role == "weight":
            model.register_parameter(one.name, torch.nn.Parameter(tensors[one.name], requires_grad=False))
        else:
            model.register_buffer(one.name, tensors[one.name])
    return model.eval(), storages


def plain(model: Callable[..., Any]) -> Forward:
    """The model itself."""

    def forward(arguments: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        made = model(**arguments)
        return made if isinstance(made, tuple) else (made,)

    return forward


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

    return forward


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
    for number, call in enumerate(program.calls):
        storages, arguments = memory.make(program, number, ("argument",), widen)
        for name, index in call.feed.items():
            if index < len(previous) and name in arguments:
                arguments[name] = previous[index]
        trace = CallTrace()
        traces.append(trace)
        seen = {**(kept if watch else {}), **storages}
        before = {name: one.memory[~one.covered].clone() for name, one in seen.items()}
        try:
            with torch.no_grad(), circumstances(call):
                results = forward(arguments)
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
        if 0 <= call.write < len(results):
            write_into(results[call.write])
        alive += results
        previous = results
        trace.results = [one.detach().clone() for one in alive]
        trace.storages = {name: one.memory.clone() for name, one in seen.items()}
    return traces


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
    with sdpa_kernel(backends) if backends else contextlib.nullcontext():
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
