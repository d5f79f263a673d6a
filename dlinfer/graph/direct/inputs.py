"""What a compiled call reads from its arguments, what it needs them to be, and what its capture assumed of them."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.ir.conj_neg import is_lazy, may_be_lazy
from dlinfer.graph.torch_private.dynamo import source_name
from dlinfer.graph.torch_private.expressions import Size
from dlinfer.graph.torch_private.symbols import fixed_size


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph: the expression over ``L`` that reads it, and what it must be.

    dtype: of a tensor; empty for a number. sizes: of a tensor, None where the graph takes any.
    strides: None for a contiguous tensor; else they must be these. device: of a tensor.
    resolved: the graph resolves a lazily conjugated or negated tensor itself.
    folded: the number that the graph took as a constant. number: the type of one that it takes as an input.
    """

    source: str
    dtype: str
    sizes: tuple[int | None, ...]
    strides: tuple[int, ...] | None = None
    device: str = ""
    folded: float | None = None
    number: str = ""
    resolved: bool = False

    @classmethod
    def of(cls, source: str, example: Any, value: Any) -> "InputSpec":
        """The spec of a graph input with this fake, that was read as ``value``."""
        if isinstance(value, float):  # a module's eps: Dynamo passes it as a tensor, the capture folds it
            return cls(source, "", (), folded=value)
        if not isinstance(example, torch.Tensor):
            return cls(source, "", (), number=type(value).__name__)
        strides = None if value.is_contiguous() else value.stride()
        return cls(
            source,
            str(value.dtype),
            tuple(map(fixed_size, example.shape)),
            strides,
            str(value.device),
            resolved=is_lazy(value),
        )

    def check(self, value: Any, steady: bool = True) -> None:
        """Raises ArtifactInputError where a value cannot be this input.

        steady: it is taken where it lies; a tensor that is read at each call is copied where it is not contiguous.
        """
        if not self._takes(value, steady):
            raise ArtifactInputError(name=source_name(self.source), expected=str(self), given=shown(value))

    def _takes(self, value: Any, steady: bool) -> bool:
        if self.folded is not None:
            return value == self.folded
        if not self.dtype:
            return type(value).__name__ == self.number
        return (
            isinstance(value, torch.Tensor)
            and (str(value.dtype), str(value.device)) == (self.dtype, self.device)
            and value.dim() == len(self.sizes)
            and (self.resolved or not steady or not is_lazy(value))
            and all(want in (None, size) for want, size in zip(self.sizes, value.shape, strict=True))
            and (
                value.is_contiguous() or not steady
                if self.strides is None
                else value.stride() == self.strides
            )
        )

    def mismatches(self, value: str, name: Callable[[Any], str]) -> Iterator[str]:
        """Python expressions, one of which is true where the input named ``value`` cannot be this one.

        name: gives a name in scope for an object. Whether it is contiguous is not asked: a call copies what is not.
        """
        if not self.dtype:
            yield f"type({value}).__name__ != {self.number!r}"
            return
        yield f"{value}.dtype is not {name(getattr(torch, self.dtype.removeprefix('torch.')))}"
        yield f"{value}.dim() != {len(self.sizes)}"
        device = torch.device(self.device)
        yield f"not {value}.is_cpu" if device.type == "cpu" else f"{value}.device != {name(device)}"
        for dim, size in enumerate(self.sizes):
            if size is not None:
                yield f"{value}.shape[{dim}] != {size}"

    def as_taken(self, value: str) -> str:
        """Python text for the input named ``value`` as a graph takes it: a tensor is contiguous and resolved."""
        if not self.dtype:
            return value
        lazy = may_be_lazy(getattr(torch, self.dtype.removeprefix("torch.")))
        return f"{value}.resolve_conj().resolve_neg().contiguous()" if lazy else f"{value}.contiguous()"

    def __str__(self) -> str:
        if self.folded is not None:
            return str(self.folded)
        if not self.dtype:
            return f"a number of type {self.number}"
        sizes = ", ".join("any" if size is None else str(size) for size in self.sizes)
        layout = "contiguous" if self.strides is None else f"strides {self.strides}"
        return f"a {self.dtype} tensor of sizes ({sizes}), {layout}, on {self.device}"


@dataclass(frozen=True)
class Assumption:
    """A condition on sizes and numbers that a graph holds under, over v0, v1, ..., which are read by ``sources``."""

    condition: Size
    sources: tuple[str, ...]

    def check(self, given: Mapping[str, Any]) -> None:
        """Raises ArtifactInputError where it is not true of the arguments."""
        values = {f"v{index}": evaluate(source, given) for index, source in enumerate(self.sources)}
        if not self.condition.evaluate(values):
            numbers = ", ".join(str(number) for number in values.values())
            raise ArtifactInputError(
                name=", ".join(map(source_name, self.sources)), expected=str(self), given=numbers
            )

    def changing(self, steady: Collection[str]) -> list[str]:
        """What it reads that is not steady."""
        return [source_name(source) for source in self.sources if not is_steady(source, steady)]

    def __str__(self) -> str:
        names = {f"v{index}": source_name(source) for index, source in enumerate(self.sources)}
        return str(self.condition.renamed({name: names[name] for name in self.condition.symbols}))


def shown(value: Any) -> str:
    """A value as an error names it."""
    if isinstance(value, torch.Tensor):
        layout = "contiguous" if value.is_contiguous() else f"strides {value.stride()}"
        return f"a {value.dtype} tensor of sizes {tuple(value.shape)}, {layout}, on {value.device}"
    return repr(value)


_EXPRESSION = re.compile(r"L\['(\w+)'\](\.(?:size|stride|storage_offset)\(\)|\.\w+|\['\w+'\]|\[\d+\])*")


def root(source: str) -> str:
    """The argument that an expression reads from; empty for an expression of another form."""
    found = _EXPRESSION.fullmatch(source)
    return found.group(1) if found else ""


def evaluate(source: str, given: Mapping[str, Any]) -> Any:
    """The value of an expression over ``L``: attributes and items only. Raises KeyError on another form."""
    if not root(source):
        raise KeyError(source)
    return eval(source, {"__builtins__": {}}, {"L": given})


def is_steady(source: str, steady: Collection[str]) -> bool:
    """Whether an expression reads from the function's owner or something named in ``steady``."""
    name = source_name(source)
    return any(name == one or name.startswith((f"{one}.", f"{one}[")) for one in ("self", *steady))
