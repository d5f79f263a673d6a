"""How calls reach the simulation: torch's ops under the golden schemas, Python's functions under the golden signatures.

Both count calls, see host views of the device's tensors, and give results on the device.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dlinfer.conformance import stand_in
from tests.vendor import simulated_graph
from tests.vendor.maca import schemas
from tests.vendor.maca.simulated_card.install import NAME

calls: Counter[str] = Counter()
"""How often each of the vendor's functions was called."""
_libraries: list[torch.library.Library] = []  # a Library that dies takes its kernels along


def register(space: str, implementations: Mapping[str, Callable[..., Any]]) -> None:
    """Define the golden schemas of a namespace of torch.ops, with what stands behind them."""
    library = torch.library.Library(space, "DEF")
    for line in schemas.golden(space):
        library.define(line.removeprefix(f"{space}::"))
        name = schemas.name(line).removeprefix(f"{space}::")
        library.impl(name, simulated(name, implementations[name]), "PrivateUse1")
    _libraries.append(library)


def simulated(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """``implementation`` on host views of what it is given."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if simulated_graph.capturing():
            return simulated_graph.record(name, run, args, kwargs)
        calls[name] += 1

        def show(x: Tensor) -> Tensor:
            if x.device.type != NAME:
                raise RuntimeError(f"{name}: a tensor lies on {x.device}")
            return stand_in.on_host(x)

        host = pytree.tree_map_only(Tensor, show, (args, kwargs))
        try:
            out = implementation(*host[0], **host[1])
        except Exception as cause:
            raise type(cause)(f"{name}: {cause}") from cause
        return pytree.tree_map_only(Tensor, stand_in.to_device, out)

    return run


def signature_of(implementation: Callable[..., Any]) -> str:
    """A Python function's parameters as the golden file writes them."""
    parts = map(str, inspect.signature(implementation).parameters.values())
    return f"{implementation.__name__}({', '.join(parts)})"
