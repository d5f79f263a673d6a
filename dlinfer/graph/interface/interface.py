"""The interface of a compiled graph, and the check of a call's values as generated Python.

Artifacts and sessions use ``Interface.bind``, which checks a whole call. Bound calls write ``mismatches`` and
``as_taken`` into a function of their own, which also reads the values.
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

Bind = Callable[[Sequence[Any]], tuple[list[Any], tuple[int, ...]]]
"""Takes a value for each input; gives all that the graph is called with, and the values of its symbols."""

Name = Callable[[object], str]
"""Gives a name for an object in the scope of the generated code."""


def mismatches(port: Port, value: str, name: Name) -> Iterator[str]:
    """Python expressions, one of which is true (or raises) where the variable ``value`` does not fit a port.

    Sizes that depend on symbols are compared by ``Interface.bind``.
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
    """Python for a value that fits, as the graph takes it: without conj and neg bits, and contiguous."""
    if not port.may_be_copied:
        return value
    resolved = f"{value}.resolve_conj().resolve_neg()" if may_be_lazy(port.dtype) else value
    return f"{resolved}.contiguous()" if port.strides is None else resolved


@dataclass(frozen=True)
class Interface:
    """What a compiled graph takes besides its weights, and what it gives, in the graph's order.

    symbols: the range of each symbol. conditions: comparisons that must be true of the symbols at each call.
    constants: values that the graph was compiled with, by their place among all values of a call.
    examples: what the symbols were in the call that the graph was compiled with, where that is known.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...] = ()
    symbols: Mapping[str, Range] = field(default_factory=dict[str, Range])
    conditions: tuple[Size, ...] = ()
    constants: Mapping[int, Any] = field(default_factory=dict[int, Any])
    examples: Mapping[str, int] = field(default_factory=dict[str, int])

    @cached_property
    def bind(self) -> Bind:
        """Takes a value for each input; returns what the graph is called with, constants too, and the symbols' values.

        Raises ArtifactInputError for a value that does not fit.
        """
        return _Binder(self).function()

    def values_among(self, leaves: Sequence[Any], names: Sequence[str] = ()) -> Sequence[Any]:
        """The values for the inputs among all values of a call. Raises ArtifactInputError for another constant.

        names: what errors call the values.
        """
        for place, constant in self.constants.items():
            value = leaves[place]
            if type(value) is not type(constant) or value != constant:
                name = names[place] if names else f"argument {place}"
                raise ArtifactInputError(name=name, expected=repr(constant), given=shown(value))
        if not self.constants:
            return leaves
        return [value for place, value in enumerate(leaves) if place not in self.constants]

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where a call reads each symbol: (input, dimension) of the first size that is nothing else."""
        found: dict[str, tuple[int, int]] = {}
        for index, port in enumerate(self.inputs):
            for dim, size in enumerate(port.sizes):
                if size is not None and size.symbol is not None:
                    found.setdefault(size.symbol, (index, dim))
        return found

    def place_name(self, index: int, dim: int) -> str:
        """A size of an input as errors name it."""
        port = self.inputs[index]
        return port.name if port.number else f"{port.name}.size()[{dim}]"

    def usual(self, symbol: str) -> int:
        """Return a value of a symbol that is as good as any: the example's, or the lowest above 0."""
        return self.examples.get(symbol, max(1, self.symbols[symbol][0]))

    @property
    def is_dynamic(self) -> bool:
        """Whether any size may change from call to call."""
        return any(port.is_dynamic for port in (*self.inputs, *self.outputs))


class _Binder:
    """Writes the function line by line. No name of a file stands in it: symbols become n0, n1, ..."""

    def __init__(self, interface: Interface) -> None:
        self._interface = interface
        self._names = {symbol: f"n{index}" for index, symbol in enumerate(interface.places)}
        self._scope: dict[str, Any] = {**FUNCTIONS, "self": self}
        self._objects: dict[int, str] = {}

    def function(self) -> Bind:
        ports = self._interface.inputs
        values = [f"x{index}" for index in range(len(ports))]
        body = [f"{''.join(f'{value}, ' for value in values)} = values"] if values else []
        for index, port in enumerate(ports):
            body += self._port(index, port, values[index])
        for index, port in enumerate(ports):
            body += self._sizes(index, port, values[index])
        for number, condition in enumerate(self._interface.conditions):
            if set(condition.symbols) <= set(self._names):
                body.append(f"if not ({condition.renamed(self._names)}): self.broken({number}, values)")
        taken = [as_taken(port, value) for port, value in zip(ports, values, strict=True)]
        for place, constant in sorted(self._interface.constants.items()):
            taken.insert(place, self.name(constant))
        symbols = "".join(f"{self._names[name]}, " for name in self._names)
        body.append(f"return [{', '.join(taken)}], ({symbols})")
        lines = "".join(f"        {line}\n" for line in body)
        text = f"def bind(values):\n    try:\n{lines}    except ZeroDivisionError: self.divided()\n"
        exec(
            compile(text, "<dlinfer interface>", "exec"), self._scope
        )  # text of this module and of its printer
        return self._scope["bind"]

    def name(self, value: object) -> str:
        """A name in the scope."""
        if id(value) not in self._objects:
            self._objects[id(value)] = f"k{len(self._objects)}"
            self._scope[self._objects[id(value)]] = value
        return self._objects[id(value)]

    def _port(self, index: int, port: Port, value: str) -> Iterator[str]:
        """Lines that compare what a value is by itself, and read the symbols that it shows."""
        refuse = f"self.refuse({index}, {value})"
        yield f"if {' or '.join(mismatches(port, value, self.name))}: {refuse}"
        if port.offset is not None:
            yield f"if {value}.storage_offset() != {port.offset}: {refuse}"
        for dim, (size, (low, high)) in enumerate(zip(port.sizes, port.bounds, strict=True)):
            read = value if port.number else f"{value}.shape[{dim}]"
            if size is None or size.fixed is not None:
                if port.number and size is not None:
                    yield f"if {read} != {size}: {refuse}"
                continue
            if size.symbol is not None and self._interface.places[size.symbol] == (index, dim):
                yield f"{self._names[size.symbol]} = {read}"
            if size.symbol is not None:
                yield f"if {read} < {low}{'' if high is None else f' or {read} > {high}'}: {refuse}"

    def _sizes(self, index: int, port: Port, value: str) -> Iterator[str]:
        """Lines that compare sizes and strides that depend on symbols."""
        for dim, size in enumerate(port.sizes):
            if size is None or size.fixed is not None or not set(size.symbols) <= set(self._names):
                continue
            if size.symbol is None or self._interface.places[size.symbol] != (index, dim):
                read = value if port.number else f"{value}.shape[{dim}]"
                yield f"if {read} != {size.renamed(self._names)}: self.unequal({index}, {dim}, values)"
        if port.strides is not None and any(stride.fixed is None for stride in port.strides):
            strides = "".join(f"{stride.renamed(self._names)}, " for stride in port.strides)
            yield f"if {value}.stride() != ({strides}): self.refuse({index}, {value})"

    # --- what the function raises

    def refuse(self, index: int, value: Any) -> None:
        port = self._interface.inputs[index]
        raise ArtifactInputError(name=port.name, expected=port, given=port.misfit(value))

    def unequal(self, index: int, dim: int, values: Sequence[Any]) -> None:
        size, read = self._interface.inputs[index].sizes[dim], self._interface.place_name(index, dim)
        assert size is not None
        names, numbers = self._read(size.symbols, values)
        sides, numbers = [read, str(size.renamed(names))], [self._number(index, dim, values), *numbers]
        if size.symbol:  # the one that comes first is named first
            sides, numbers = sides[::-1], numbers[::-1]
        raise ArtifactInputError(
            name=f"{read}, {', '.join(names.values())}",
            expected=" == ".join(sides),
            given=", ".join(map(str, numbers)),
        )

    def broken(self, number: int, values: Sequence[Any]) -> None:
        condition = self._interface.conditions[number]
        names, numbers = self._read(condition.symbols, values)
        raise ArtifactInputError(
            name=", ".join(names.values()),
            expected=str(condition.renamed(names)),
            given=", ".join(map(str, numbers)),
        )

    def divided(self) -> None:
        raise ArtifactInputError(name="sizes", expected="sizes that can be divided by", given="0")

    def _read(self, symbols: Sequence[str], values: Sequence[Any]) -> tuple[Mapping[str, str], list[int]]:
        places = {name: self._interface.places[name] for name in symbols}
        names = {name: self._interface.place_name(*place) for name, place in places.items()}
        return names, [self._number(*place, values) for place in places.values()]

    def _number(self, index: int, dim: int, values: Sequence[Any]) -> int:
        value = values[index]
        return value.shape[dim] if isinstance(value, torch.Tensor) else value
