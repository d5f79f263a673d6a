"""A random program from a seed: steps are tried eagerly while they are drawn, so that nearly all of them run."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz import memory
from tests.fuzz.execute import calls, module, namespace, plain, run_step, vendor_kept
from tests.fuzz.program import DOORS, NESTS, Call, Input, Program, Step
from tests.fuzz.states import STATES

FLOATS = ("float32", "float32", "float32", "float32", "bfloat16", "float16", "float64")
INTEGERS = ("int64", "int64", "int32", "uint8", "int8", "int16")
_OF_INDICES = re.compile("out of (bounds|range)|ids of|slots below")
"""Errors of indices; programs keep the calls that end with them."""

_LARGEST = 4096  # elements of a value; programs are for many cases, not for large ones


def alternatives(text: str) -> list[str]:
    """The texts between bars and ends of lines."""
    return text.strip().replace("\n", "|").split("|")


class Draft:
    """A program that is being drawn, with a value of every name at the first call."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: dict[str, torch.Tensor] = {}
        self.sizes = {
            name: self.random.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 16, 17, 33)) for name in "ABCD"
        }
        self.dtype = self.random.choice(FLOATS)
        self.numbers: dict[str, float] = {}
        self.globals = namespace()
        self.raises = False

    def chance(self, share: float) -> bool:
        """True in this share of draws."""
        return self.random.random() < share

    def choose(self, *choices: Any) -> Any:
        """One of the arguments."""
        return self.random.choice(choices)

    def new_input(self, shape: Sequence[str | int], dtype: str = "", **given: Any) -> str:
        """Add an input and return its name. What is not given is drawn."""
        role = given.pop("role", "") or self.random.choices(("argument", "buffer", "weight"), (6, 3, 1))[0]
        dtype = dtype or self.dtype
        name = f"{role[0]}{len(self.inputs)}"
        content = given.pop("content", "") or self._content(dtype)
        layout = given.pop("layout", "") or self.layout()
        one = Input(name, role, dtype, tuple(shape), layout, content, **given)
        if role == "weight" and not getattr(torch, dtype).is_floating_point:
            one = replace(one, role="buffer")
        if role != "argument":  # the module keeps it while sizes change
            one = replace(one, shape=tuple(self.sizes[s] if isinstance(s, str) else s for s in one.shape))
        if "alias" not in given and self.chance(0.12):
            one = self._alias(one)
        program = Program(self.seed, (one,), (), (), (Call(dict(self.sizes)),))
        self.values[name] = memory.make(program, 0, (one.role,))[1][name]
        self.inputs.append(one)
        return name

    def new_number(self) -> str:
        """The name of a number that each call chooses."""
        if not self.numbers or (len(self.numbers) < 3 and self.chance(0.4)):
            self.numbers[f"n{len(self.numbers)}"] = self.choose(0.5, 1.5, 2.0, 1.0, 0.125)
        return self.random.choice(list(self.numbers))

    def _content(self, dtype: str) -> str:
        if getattr(torch, dtype).is_floating_point:
            return self.random.choices(("normal", "special", "extreme", "whole", "same"), (10, 3, 2, 1, 1))[0]
        return self.random.choices(("normal", "limits"), (3, 1))[0]

    def layout(self) -> str:
        """How a tensor lies in memory, half of the time as a tensor of its own."""
        if self.chance(0.03):  # a graph that also writes is refused
            return "negated"
        return "plain" if self.chance(0.5) else self.random.choice(memory.LAYOUTS[1:-1])

    def _alias(self, one: Input) -> Input:
        alike = [
            other
            for other in self.inputs
            if (other.dtype, other.shape, other.alias) == (one.dtype, one.shape, ())
            and other.role != "weight"
        ]
        if not alike or one.role == "weight":
            return one
        # Only what is made at the same time can share memory; a buffer is made once.
        alike = [other for other in alike if other.role == one.role]
        return (
            replace(one, alias=(self.random.choice(alike).name, self.choose("same", "view", "shift")))
            if alike
            else one
        )

    def input(self, name: str) -> Input:
        """The input of a name."""
        return next(one for one in self.inputs if one.name == name)

    def pick(self, fits: Callable[[torch.Tensor], bool]) -> str | None:
        """The name of a value that fits, the latest ones more often; None where there is none."""
        names = [name for name, value in self.values.items() if fits(value)]
        return self.random.choice(names[-4:] if self.chance(0.6) else names) if names else None

    def floats(self, least: int = 0, dtype: str = "") -> str:
        """The name of a float value of at least so many dimensions; a new input where there is none."""
        kept = getattr(torch, dtype) if dtype else None
        found = self.pick(lambda v: v.is_floating_point() and v.dim() >= least and kept in (None, v.dtype))
        return found or self.new_input(self.shape(least), dtype)

    def integers(self, least: int = 0) -> str:
        """Likewise of whole numbers."""
        found = self.pick(lambda v: not v.is_floating_point() and v.dtype != torch.bool and v.dim() >= least)
        return found or self.new_input(self.shape(least), self.random.choice(INTEGERS))

    def anything(self, least: int = 0) -> str:
        """The name of any value of at least so many dimensions."""
        return self.pick(lambda v: v.dim() >= least) or self.floats(least)

    def shape(self, least: int = 0) -> tuple[str | int, ...]:
        """A random shape."""
        rank = max(least, self.random.choices((0, 1, 2, 3, 4), (1, 3, 8, 5, 2))[0])
        return tuple(self.choose("A", "B", "C", "A", "B", 2, 4) for _ in range(rank))

    def beside(self, name: str) -> str | float:
        """Something that broadcasts with a value: another one, a new input, or a number."""
        value = self.values[name]
        if self.chance(0.25):
            return (
                self.choose(2, 3, -1, 7)
                if not value.is_floating_point()
                else self.choose(0.5, 2, -1.5, 1e-3, 3.0)
            )
        sizes = tuple(value.shape)
        other = self.pick(lambda v: tuple(v.shape) in (sizes, sizes[1:], sizes[-1:]) and v is not value)
        return other or self.new_input(
            sizes[self.choose(0, 0, 0, 1) :], str(value.dtype).removeprefix("torch.")
        )

    def dim(self, name: str) -> int:
        """A dimension of a value, from the front or from the end."""
        rank = self.values[name].dim()
        return self.random.randrange(-rank, rank) if rank else 0

    def add(self, step: Step) -> bool:
        """Try a step; keep it if it runs and its result is small."""
        try:
            made = run_step(step, {**self.values, **self.numbers}, self.globals)
        except Exception:  # noqa: BLE001 - a step that does not fit its operands is drawn anew
            return False
        if step.makes:
            if not isinstance(made, torch.Tensor) or made.numel() > _LARGEST or made.is_complex():
                return False
            self.values[step.makes] = made
        self.steps.append(step)
        return True

    def name(self) -> str:
        """The name of the next value."""
        return f"v{len(self.steps)}"


def generate(seed: int, steps: int = 0) -> Program:
    """The program of a seed. ``steps``: how many; 0 draws it."""
    from tests.fuzz.families import FAMILIES

    torch.manual_seed(seed)
    draft = Draft(seed)
    draft.new_input(draft.shape(1), role="argument")
    wanted = steps or draft.random.choice((2, 3, 4, 6, 8, 10, 12))
    focus = draft.random.sample(
        list(FAMILIES), 3
    )  # some programs are of few kinds of steps, so that they meet often
    weights = [family.weight * (4 if family in focus else 1) for family in FAMILIES]
    for _ in range(wanted * 4):
        if len(draft.steps) >= wanted:
            break
        family = draft.random.choices(list(FAMILIES), weights)[0]
        with torch.no_grad():
            step = family.draw(draft)
            if step is not None:
                draft.add(replace(step, features=(family.name, *step.features)))
    program = Program(
        seed,
        tuple(draft.inputs),
        tuple(draft.steps),
        _returns(draft),
        (Call(dict(draft.sizes), numbers=dict(draft.numbers)),),
    )
    # torch takes ten seconds to trace attention with a symbol for each size.
    dynamic = (
        draft.choose(None, None, False)
        if _attends(program) and draft.chance(0.9)
        else draft.choose(True, None, False)
    )
    program = _with_calls(replace(program, dynamic=dynamic).pruned(), draft)
    if program.door == "direct":
        program = replace(program, returns=program.returns[:1]).pruned()
    elif draft.chance(0.12):
        program = replace(program, nest=draft.choose(*NESTS))
    return _running(program, draft)


def _running(program: Program, draft: Draft) -> Program:
    """Without most of the calls at which eager raises for sizes that do not fit; errors of indices stay."""
    if draft.chance(0.1):
        return program
    while len(program.calls) > 1:
        model, kept = module(program)
        with vendor_kept():
            traces = calls(program, plain(model), kept, watch=False)
        error = traces[-1].error
        if error is None or isinstance(error, IndexError) or _OF_INDICES.search(str(error)):
            return program
        number = len(traces) - 1
        if number == 0:
            return replace(program, calls=program.calls[:1])
        program = replace(program, calls=program.calls[:number] + program.calls[number + 1 :])
    return program


def _returns(draft: Draft) -> tuple[str, ...]:
    read = {name for step in draft.steps for name in step.uses}
    made = [step.makes for step in draft.steps if step.makes]
    ends = [name for name in made if name not in read]
    written = [step.uses[0] for step in draft.steps if "write" in step.features]
    found = [*ends[-4:], *(name for name in made if draft.chance(0.2))]
    found += [name for name in written if draft.chance(0.3)]
    found += [name for name in draft.values if draft.chance(0.03)]
    if not found:
        found = made[-1:] or [draft.inputs[0].name]
    unique = list(dict.fromkeys(found))[-8:]
    return (*unique, unique[0]) if draft.chance(0.05) else tuple(unique)


def _with_calls(program: Program, draft: Draft) -> Program:
    """Several calls, of which each may differ in anything."""
    sizes = dict(program.calls[0].sizes)
    first = replace(program.calls[0], sdpa=_backend(program, draft))
    made = [first]
    for _ in range(draft.choose(1, 2, 2, 3)):
        call = replace(first, sizes=dict(sizes), changes={}, feed={}, sdpa=_backend(program, draft), write=-1)
        if draft.chance(0.4):
            call = replace(
                call,
                sizes={
                    name: draft.choose(0, 1, 2, 3, 5, 8, 9) if draft.chance(0.6) else n
                    for name, n in sizes.items()
                },
            )
        made.append(replace(call, changes=_changes(program, draft)))
    if draft.chance(0.35):  # arguments that change make Dynamo compile anew; backends and vendors do not
        made = [replace(first, sdpa=_backend(program, draft)) for _ in made]
    if draft.chance(0.25):
        for number in range(1, len(made)):
            feed = _feed(program, draft)
            # Kernels of attention do not compare the numbers of keys and values, and read what lies behind the fewer.
            if _attends(program) and made[number].sizes != made[number - 1].sizes:
                feed = {}
            made[number] = replace(made[number], feed=feed)
    if draft.chance(0.3):
        number = draft.random.randrange(len(made))
        made[number] = replace(made[number], write=draft.random.randrange(len(program.returns)))
    if any("cache" in step.features for step in program.steps) and draft.chance(0.5):
        made = [replace(call, vendor=draft.choose("cpu", "openvino")) for call in made]
    door = _door(program, draft)
    if door == "loaded":  # a session copies inputs that are not contiguous, so a result may be the copy
        made = [replace(call, write=-1) for call in made]
    kept = program.of_role("buffer") or (program.of_role("weight") and _writes(program))
    alone = door == "compile" and not kept and not any(call.feed for call in made)
    alone = alone and not any("opaque" in step.features for step in program.steps)
    threads = alone and not any(call.vendor for call in made) and draft.chance(0.08)
    if threads:  # the allowed backends are the process's
        made = [replace(call, sdpa="") for call in made]
    states = not threads and draft.chance(0.3 if door in ("compile", "direct") else 0.8)
    for number in range(len(made)) if states else ():
        if draft.chance(0.6) and (door == "compile" or number):
            made[number] = replace(made[number], state=draft.choose(*STATES))
    if any(call.state == "inference" for call in made):  # nothing outside of the mode writes what it gives
        made = [replace(call, feed={}, write=-1) for call in made]
    gradients = states and door == "compile" and bool(program.of_role("weight")) and draft.chance(0.5)
    own = [one for one in program.of_role("buffer", "weight") if not one.alias]
    writable = [one.name for one in own if getattr(torch, one.dtype).is_floating_point]
    for number in range(1, len(made)):
        change = {
            name: draft.choose(0.25, 1.75, 3.0, 0.7) for name in made[number].numbers if draft.chance(0.7)
        }
        alone = (
            door == "compile" and not threads
        )  # two threads share the model, and one would read what the other writes
        written = draft.random.choice(writable) if writable and alone and draft.chance(0.2) else ""
        made[number] = replace(made[number], numbers=made[number].numbers | change, data=written)
    apart = {one.name: {"alias": []} for one in program.of_role("argument") if one.alias[1:] == ("bytes",)}
    if apart and draft.chance(0.6):
        made[0] = replace(made[0], changes=made[0].changes | apart)
    return replace(program, calls=tuple(made), door=door, threads=threads, gradients=gradients)


def _door(program: Program, draft: Draft) -> str:
    door = draft.random.choices(DOORS, (10, 1, 1, 1))[0]
    # An export takes a number for a constant, and runs the module to try it: a count would go on.
    if program.calls[0].numbers or any("opaque" in step.features for step in program.steps):
        return "direct" if door == "direct" else "compile"
    return door


def _writes(program: Program) -> bool:
    return any("write" in step.features for step in program.steps)


def _backend(program: Program, draft: Draft) -> str:
    return draft.choose("", "MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION") if _attends(program) else ""


def _attends(program: Program) -> bool:
    return any("attention" in step.features for step in program.steps)


def _may_hide(program: Program) -> set[str]:
    """The values of attention. Where a hidden one is infinity or NaN, a kernel may give NaN, as torch's do, or not."""
    return {step.uses[2] for step in program.steps if "F.scaled_dot_product_attention" in step.text}


def _changes(program: Program, draft: Draft) -> dict[str, dict[str, Any]]:
    changes: dict[str, dict[str, Any]] = {}
    hidden = _may_hide(program)
    for one in program.of_role("argument"):
        change: dict[str, Any] = {}
        if draft.chance(0.2):
            change["layout"] = draft.choose("plain", draft.layout())
        in_arena = one.alias[1:] == ("bytes",)  # whose memory is no longer
        if draft.chance(0.05) and one.content in ("normal", "special") and not in_arena:
            change["dtype"] = draft.choose(*FLOATS, *INTEGERS)
        if draft.chance(0.1) and one.content == "index":
            change["content"] = "beyond"
        if draft.chance(0.15) and one.content == "normal" and getattr(torch, one.dtype).is_floating_point:
            change["content"] = draft.choose("same" if one.name in hidden else "special", "extreme", "same")
        if change:
            changes[one.name] = change
    return changes


def _feed(program: Program, draft: Draft) -> dict[str, int]:
    arguments = [one for one in program.of_role("argument") if one.content in ("normal", "special", "same")]
    if not arguments:
        return {}
    dtypes = {name: value.dtype for name, value in draft.values.items()}
    shapes = {name: value.shape for name, value in draft.values.items()}
    fitting = [
        (one.name, index)
        for one in arguments
        for index, name in enumerate(program.returns)
        if name in dtypes and dtypes[name] == dtypes[one.name] and shapes[name] == shapes[one.name]
    ]
    return dict([draft.random.choice(fitting)]) if fitting else {}
