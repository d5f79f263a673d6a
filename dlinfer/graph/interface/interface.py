"""The interface of a compiled graph, and generated Python code that checks a call's values.

Artifacts, sessions and bound calls check values with ``Interface.bind``. Bound calls also generate a reader, a function
that finds the values in a call's arguments. The checks and conversions in the reader come from ``mismatches`` and
``as_taken``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.interface.ports import Port, Range, shown
from dlinfer.graph.ir.conj_neg import may_be_lazy
from dlinfer.graph.torch_private.expressions import FUNCTIONS, Size

Bind = Callable[[Sequence[object]], tuple[list[Any], tuple[int, ...]]]
"""A function from a call's values to the graph's arguments, constants included, and to its symbols' values."""

Name = Callable[[object], str]
"""A function from an object to its name in the scope of the generated code."""


def mismatches(port: Port, value: str, name: Name) -> Iterator[str]:
    """Yield Python expressions over a variable: if its value does not fit ``port``, one of them is true or raises.

    value: the variable. name: returns the name of an object in the generated code.
    Sizes that depend on symbols are not tested here. ``Interface.bind`` tests them.
    """
    if port.number:
        yield f"type({value}) is not int"
        return
    yield f"not isinstance({value}, {name(torch.Tensor)})"
    yield f"{value}.dtype is not {name(port.dtype)}"
    yield f"{value}.layout is not {name(torch.strided)}"
    yield f"{value}.is_nested"
    yield f"{value}.dim() != {len(port.sizes)}"
    yield f"not {value}.is_cpu" if port.device.type == "cpu" else f"{value}.device != {name(port.device)}"
    for dim, size in enumerate(port.sizes):
        if size is not None and size.fixed is not None:
            yield f"{value}.shape[{dim}] != {size}"
    if not port.may_be_copied:
        if may_be_lazy(port.dtype) and not port.resolved:
            yield f"{value}.is_neg() or {value}.is_conj()"
        if port.strides is None:
            yield f"not {value}.is_contiguous()"
    if port.strides is not None and all(stride.fixed is not None for stride in port.strides):
        yield f"{value}.stride() != ({''.join(f'{stride}, ' for stride in port.strides)})"


def as_taken(port: Port, value: str) -> str:
    """Return Python code that converts a variable's value to the graph's input.

    The code resolves conj and neg bits and makes the tensor contiguous, unless the graph needs the tensor itself.
    value: the variable. Its value fits ``port``.
    """
    if not port.may_be_copied:
        return value
    resolved = f"{value}.resolve_conj().resolve_neg()" if may_be_lazy(port.dtype) else value
    return f"{resolved}.contiguous()" if port.strides is None else resolved


def _same_constant(value: object, constant: object) -> bool:
    """Return whether two values have the same type and are equal. Here 0.0 and -0.0 differ, and NaN equals NaN."""
    if type(value) is not type(constant):
        return False
    if isinstance(value, (float, complex)):
        return repr(value) == repr(constant)
    return value == constant


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a compiled graph, each in the graph's order. Weights are not among the inputs.

    symbols: symbol -> its range.
    conditions: comparisons of symbols that must be true at each call.
    constants: index in the list of a call's values -> the constant that the graph was compiled with for this index.
    examples: symbol -> its value in the call that the graph was compiled for. Some symbols may be missing.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...] = ()
    symbols: Mapping[str, Range] = field(default_factory=dict[str, Range])
    conditions: tuple[Size, ...] = ()
    constants: Mapping[int, object] = field(default_factory=dict[int, object])
    examples: Mapping[str, int] = field(default_factory=dict[str, int])

    @cached_property
    def bind(self) -> Bind:
        """A function that checks a call's values and returns the graph's inputs and the symbols' values.

        It raises ArtifactInputError for a value that does not fit.
        """
        return _Binder(self).function()

    def values_among(self, leaves: Sequence[object], names: Sequence[str] = ()) -> Sequence[object]:
        """Check the constants among a call's values. Return the other values: one for each port in ``inputs``.

        leaves: all values of a call. names: the names of these values in errors.
        Raises ArtifactInputError if a constant differs from the one that the graph was compiled with.
        """
        for place, constant in self.constants.items():
            value = leaves[place]
            if not _same_constant(value, constant):
                name = names[place] if names else f"argument {place}"
                raise ArtifactInputError(name=name, expected=repr(constant), given=shown(value))
        if not self.constants:
            return leaves
        return [value for place, value in enumerate(leaves) if place not in self.constants]

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Symbol -> the place where a call reads the symbol's value: the pair (index of an input, dimension).

        This is the first place whose size is the symbol alone, and not an expression such as ``2*s0``.
        """
        places: dict[str, tuple[int, int]] = {}
        for index, port in enumerate(self.inputs):
            for dim, size in enumerate(port.sizes):
                if size is not None and size.symbol is not None:
                    places.setdefault(size.symbol, (index, dim))
        return places

    def place_name(self, index: int, dim: int) -> str:
        """Return the name that errors use for the size of an input in dimension ``dim``, or for an integer input."""
        port = self.inputs[index]
        return port.name if port.number else f"{port.name}.size()[{dim}]"

    def usual(self, symbol: str) -> int:
        """Return a possible value of a symbol: its example if there is one, else the lowest value above 0."""
        return self.examples.get(symbol, max(1, self.symbols[symbol][0]))

    @property
    def is_dynamic(self) -> bool:
        """Whether any size of an input or output may change from call to call."""
        return any(port.is_dynamic for port in (*self.inputs, *self.outputs))


class _Binder:
    """Generates the function for ``Interface.bind``, line by line.

    The generated code contains no name from an artifact's file: it names the symbols n0, n1, ...
    """

    def __init__(self, interface: Interface) -> None:
        self._interface = interface
        self._symbols = {symbol: f"n{index}" for index, symbol in enumerate(interface.places)}
        self._shown = {symbol: interface.place_name(*place) for symbol, place in interface.places.items()}
        self._scope: dict[str, Any] = {**FUNCTIONS, "self": self}
        self._objects: dict[int, str] = {}
        self._relations: list[tuple[str, list[tuple[int, int]]]] = []

    def function(self) -> Bind:
        interface = self._interface
        values = [f"x{index}" for index in range(len(interface.inputs))]
        ports = list(zip(interface.inputs, values, strict=True))
        body = [f"{''.join(f'{value}, ' for value in values)} = values"] if values else []
        for write in (self._port, self._sizes):
            for index, (port, value) in enumerate(ports):
                body += write(index, port, value)
        for condition in interface.conditions:
            if set(condition.symbols) <= set(self._symbols):
                places = [interface.places[name] for name in condition.symbols]
                code, expected = (condition.renamed(names) for names in (self._symbols, self._shown))
                body.append(self._relation(str(code), str(expected), places))
        taken = [as_taken(port, value) for port, value in ports]
        for place, constant in sorted(interface.constants.items()):
            taken.insert(place, self.name(constant))
        symbols = "".join(f"{name}, " for name in self._symbols.values())
        body.append(f"return [{', '.join(taken)}], ({symbols})")
        lines = "".join(f"        {line}\n" for line in body)
        text = f"def bind(values):\n    try:\n{lines}    except ZeroDivisionError: self.divided()\n"
        exec(compile(text, "<dlinfer interface>", "exec"), self._scope)  # text of this module and its printer
        return self._scope["bind"]

    def name(self, value: object) -> str:
        """Return the object's name in the scope of the generated code; add the object if it has none."""
        if id(value) not in self._objects:
            self._objects[id(value)] = f"k{len(self._objects)}"
            self._scope[self._objects[id(value)]] = value
        return self._objects[id(value)]

    def _port(self, index: int, port: Port, value: str) -> Iterator[str]:
        """Yield lines that check one value by itself, such as its dtype, and lines that read symbols from its sizes."""
        refuse = f"self.refuse({index}, {value})"
        yield f"if {' or '.join(mismatches(port, value, self.name))}: {refuse}"
        if port.offset is not None:
            yield f"if {value}.storage_offset() != {port.offset}: {refuse}"
        for dim, (size, (low, high)) in enumerate(zip(port.sizes, port.bounds, strict=True)):
            read = value if port.number else f"{value}.shape[{dim}]"
            if port.number and size is not None and size.fixed is not None:
                yield f"if {read} != {size}: {refuse}"
            if size is not None and size.symbol is not None:
                if self._interface.places[size.symbol] == (index, dim):
                    yield f"{self._symbols[size.symbol]} = {read}"
                yield f"if {read} < {low}{'' if high is None else f' or {read} > {high}'}: {refuse}"

    def _sizes(self, index: int, port: Port, value: str) -> Iterator[str]:
        """Yield lines that check the sizes and strides that depend on symbols."""
        places = self._interface.places
        for dim, size in enumerate(port.sizes):
            if size is None or size.fixed is not None or not set(size.symbols) <= set(self._symbols):
                continue
            if size.symbol is not None and places[size.symbol] == (index, dim):
                continue
            read = value if port.number else f"{value}.shape[{dim}]"
            sides = [self._interface.place_name(index, dim), str(size.renamed(self._shown))]
            numbers = [(index, dim), *(places[name] for name in size.symbols)]
            if size.symbol is not None:  # an error names the earlier input first
                sides, numbers = sides[::-1], numbers[::-1]
            yield self._relation(f"{read} == {size.renamed(self._symbols)}", " == ".join(sides), numbers)
        if port.strides is not None and any(stride.fixed is None for stride in port.strides):
            strides = "".join(f"{stride.renamed(self._symbols)}, " for stride in port.strides)
            yield f"if {value}.stride() != ({strides}): self.refuse({index}, {value})"

    def _relation(self, code: str, expected: str, places: list[tuple[int, int]]) -> str:
        self._relations.append((expected, places))
        return f"if not ({code}): self.broken({len(self._relations) - 1}, values)"

    # --- errors that the generated function raises

    def refuse(self, index: int, value: object) -> None:
        port = self._interface.inputs[index]
        raise ArtifactInputError(name=port.name, expected=port, given=port.misfit(value))

    def broken(self, number: int, values: Sequence[object]) -> None:
        expected, places = self._relations[number]
        read = [values[index] for index, _ in places]
        numbers = [
            value.shape[dim] if isinstance(value, torch.Tensor) else value
            for value, (_, dim) in zip(read, places, strict=True)
        ]
        raise ArtifactInputError(
            name=", ".join(self._interface.place_name(*place) for place in places),
            expected=expected,
            given=", ".join(map(str, numbers)),
        )

    def divided(self) -> None:
        raise ArtifactInputError(name="sizes", expected="sizes that a guard can divide by", given="0")
