"""Custom ops that a compiler knows by their schemas and fake functions alone. A finding's script holds this code whole.

``count`` and ``note`` have a state that no schema tells; ``moved``, ``fewer`` and ``wider`` have wrong fake functions.
"""

import torch

LIBRARY = torch.library.Library("fuzz", "DEF")
for _schema in (
    "count(Tensor x) -> Tensor",
    "note(Tensor x) -> ()",
    "overwrite(Tensor(a!) x) -> ()",
    "moved(Tensor x) -> Tensor",
    "fewer(Tensor x) -> Tensor",
    "wider(Tensor x) -> Tensor",
):
    LIBRARY.define(_schema)

_state = {"calls": 0}


def reset() -> None:
    """Start the state of ``count`` and ``note`` anew."""
    _state["calls"] = 0


def _count(x: torch.Tensor) -> torch.Tensor:
    _state["calls"] += 1
    return x + _state["calls"]


def _note(x: torch.Tensor) -> None:
    _state["calls"] += 10


def _overwrite(x: torch.Tensor) -> None:
    x.fill_(7)


def _moved(x: torch.Tensor) -> torch.Tensor:
    return (
        x.permute(*range(x.dim())[::-1])
        .clone(memory_format=torch.contiguous_format)
        .permute(*range(x.dim())[::-1])
    )


_KERNELS = {
    "count": _count,
    "note": _note,
    "overwrite": _overwrite,
    "moved": _moved,
    "fewer": lambda x: x[1:].clone(),
    "wider": lambda x: x.to(torch.float64, copy=True),
}
for _name, _kernel in _KERNELS.items():
    LIBRARY.impl(_name, _kernel, "CPU")
    torch.library.register_fake(
        f"fuzz::{_name}",
        (lambda x: None)
        if _name in ("note", "overwrite")
        else (lambda x: torch.empty(x.shape, dtype=x.dtype)),
        lib=LIBRARY,
    )
