"""A random program as plain data: inputs, steps of Python text, what it returns, and how it is called."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

ENGINES = ("inductor", "openvino", "onnxruntime")
DOORS = ("compile", "artifact", "loaded", "direct")
NESTS = ("none", "number", "dict", "nested")


@dataclass(frozen=True)
class Input:
    """A tensor that the program reads or writes.

    role: ``argument``, ``buffer`` (kept by the module from call to call) or ``weight`` (a parameter).
    shape: sizes, numbers or names of sizes that each call chooses.
    layout: how it lies in memory (``memory.LAYOUTS``). content: what it holds (``memory.CONTENTS``).
    bound: for indices, the size that they index; a number or the name of one.
    alias: another input that it shares memory with, and how (``same``, ``view``, ``shift``, or ``bytes`` for another
    dtype); empty for none.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[str | int, ...]
    layout: str = "plain"
    content: str = "normal"
    bound: str | int = 0
    alias: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One line of the program.

    text: a Python expression (or a statement, where ``makes`` is empty) with ``{0}``, ``{1}`` for ``uses``.
    rounds: whether its float results are rounded, so that another correct kernel may give neighbours of them.
    """

    makes: str
    text: str
    uses: tuple[str, ...]
    rounds: bool = False
    features: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The step as Python."""
        expression = self.text.format(*self.uses)
        return f"{self.makes} = {expression}" if self.makes else expression


@dataclass(frozen=True)
class Call:
    """One call of the program.

    sizes: name of a size -> number. changes: input -> field of ``Input`` -> its value at this call.
    feed: argument -> number of the result of the previous call that is passed instead.
    sdpa: the attention backend that is allowed (``MATH``, ``FLASH_ATTENTION``, ``EFFICIENT_ATTENTION``); empty for all.
    vendor: the active vendor of the CPU; empty leaves it.
    write: number of the result that the caller writes into afterwards; -1 for none. state: global state of torch
    (``states.STATES``). numbers: values of the arguments that are Python floats. data: a buffer or weight that the
    caller changes through ``.data`` before the call.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    feed: dict[str, int] = field(default_factory=dict)
    sdpa: str = ""
    vendor: str = ""
    write: int = -1
    state: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    data: str = ""


@dataclass(frozen=True)
class Program:
    """A program and its calls. ``seed``: of the contents. ``door``: how it is compiled (``DOORS``).

    dynamic: torch.compile's. threads: two threads make the calls at the same time, each with tensors of its own.
    nest: what the results stand in, beside None and numbers (``NESTS``); empty for a tuple. gradients: weights record
    gradients, and the forward runs under ``torch.no_grad``.
    """

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    returns: tuple[str, ...]
    calls: tuple[Call, ...]
    dynamic: bool | None = None
    door: str = "compile"
    threads: bool = False
    nest: str = ""
    gradients: bool = False

    def of_role(self, *roles: str) -> list[Input]:
        """Its inputs of some roles, in order."""
        return [one for one in self.inputs if one.role in roles]

    def features(self) -> set[str]:
        """What it covers, by name, for the count at the end."""
        found = {feature for step in self.steps for feature in step.features}
        found |= {f"door {self.door}", f"dynamic {self.dynamic}", f"results {len(self.returns)}"}
        for one in self.inputs:
            found |= {
                f"role {one.role}",
                f"dtype {one.dtype}",
                f"layout {one.layout}",
                f"content {one.content}",
            }
            found |= {f"alias {one.role} {one.alias[1]}"} if one.alias else set()
        for call in self.calls:
            found |= {f"changed {name}" for change in call.changes.values() for name in change}
            found |= {f"content {c['content']}" for c in call.changes.values() if "content" in c}
            found |= {f"size {size}" for size in call.sizes.values() if size < 2}
            found |= {f"attention backend {call.sdpa}"} if call.sdpa else set()
            found |= {f"vendor {call.vendor}"} if call.vendor else set()
            found |= {"result fed back"} if call.feed else set()
            found |= {f"state {call.state}"} if call.state else set()
            found |= {"data written by the caller"} if call.data else set()
            found |= {"result written by the caller"} if call.write >= 0 else set()
        if len({tuple(call.sizes.items()) for call in self.calls}) > 1:
            found.add("changed sizes")
        if len({call.sdpa for call in self.calls}) > 1:
            found.add("attention backend switched")
        if len({call.state for call in self.calls}) > 1:
            found.add("state switched")
        if len({call.vendor for call in self.calls}) > 1:
            found.add("vendor switched")
        written = {step.uses[0] for step in self.steps if "write" in step.features}
        roles = {one.name: one.role for one in self.inputs}
        found |= {f"write to {roles.get(name, 'an intermediate')}" for name in written}
        found |= {f"{roles[name]} returned" for name in self.returns if name in roles}
        found |= {"two threads"} if self.threads else set()
        found |= {f"results in {self.nest}"} if self.nest else set()
        found |= {"weights record gradients"} if self.gradients else set()
        return found

    def pruned(self) -> "Program":
        """Without the inputs that nothing reads; a program keeps at least one argument."""
        needed = {name for step in self.steps for name in step.uses} | set(self.returns)
        needed |= {one.alias[0] for one in self.inputs if one.alias and one.name in needed}
        kept = tuple(one for one in self.inputs if one.name in needed)
        if not any(one.role == "argument" for one in kept):
            kept = (*kept, *self.of_role("argument")[:1])
        names = {one.name for one in kept}
        sizes = {size for one in kept for size in (*one.shape, one.bound)}
        for call in self.calls:  # a change of a shape may name another size
            sizes |= {size for name in names for size in call.changes.get(name, {}).get("shape", ())}
        calls = tuple(
            dataclasses.replace(
                call,
                sizes={size: number for size, number in call.sizes.items() if size in sizes},
                changes={name: change for name, change in call.changes.items() if name in names},
                feed={name: index for name, index in call.feed.items() if name in names},
                numbers={name: number for name, number in call.numbers.items() if name in needed},
                data=call.data if call.data in names else "",
            )
            for call in self.calls
        )
        return dataclasses.replace(self, inputs=kept, calls=calls)

    def to_json(self) -> str:
        """As one line of text; ``from_json`` reads it."""
        return json.dumps(dataclasses.asdict(self))


def from_json(text: str) -> Program:
    """The program that ``to_json`` wrote."""
    given = json.loads(text)
    inputs = [_tuples(one, "shape", "alias") for one in given.pop("inputs")]
    steps = [_tuples(one, "uses", "features") for one in given.pop("steps")]
    returns = tuple(given.pop("returns"))
    calls = tuple(Call(**one) for one in given.pop("calls"))
    return Program(
        inputs=tuple(Input(**one) for one in inputs),
        steps=tuple(Step(**one) for one in steps),
        returns=returns,
        calls=calls,
        **given,
    )


def _tuples(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return given | {name: tuple(given[name]) for name in names}


def size_of(size: str | int, sizes: dict[str, int]) -> int:
    """A size as a number."""
    return size if isinstance(size, int) else sizes[size]


def sizes_of(shape: Iterable[str | int], sizes: dict[str, int]) -> tuple[int, ...]:
    """A shape as numbers."""
    return tuple(size_of(size, sizes) for size in shape)
