"""What a compiled call reads from its arguments, as ports, and what its capture assumed of them."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.interface.ports import Port, bounds_of
from dlinfer.graph.ir.conj_neg import is_lazy
from dlinfer.graph.ir.device import HOST
from dlinfer.graph.torch_private.dynamo import source_name
from dlinfer.graph.torch_private.expressions import Size, parse_size
from dlinfer.graph.torch_private.symbols import fixed_size


def port_of(source: str, example: Any, value: Any, steady: Collection[str]) -> Port:
    """The port of a graph input with this fake, which was read from ``source`` as ``value``."""
    name, held = source_name(source), is_steady(source, steady)
    if not isinstance(example, torch.Tensor):
        return Port(name, torch.int64, (None,), ((0, None),), torch.device(HOST), number=True)
    sizes = tuple(None if (size := fixed_size(one)) is None else parse_size(size) for one in example.shape)
    strides = None if value.is_contiguous() else tuple(map(parse_size, value.stride()))
    lazy = is_lazy(value)
    return Port(
        name, value.dtype, sizes, bounds_of(sizes, {}), value.device, strides, held=held, resolved=lazy
    )


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
