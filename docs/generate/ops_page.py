"""docs/reference/ops.md: every fused op with its signature and contract."""

import inspect
import re

from dlinfer.ops import registry
from dlinfer.ops.core.spec import OpSpec
from docs.generate.text import page, prose, signature

NAME = "ops.md"
BEFORE = """\
Call an op as `dlinfer.ops.NAME(...)`. In a graph it is `torch.ops.dlinfer.NAME`. The active vendor of the tensors'
device answers; where it has no kernel for a call, the op's reference in plain torch does, and the call is counted
([`DLINFER_FALLBACK`](settings.md)). [Ops by vendor](ops_by_vendor.md) says which vendor has which kernel.

```python
import torch
import dlinfer.ops

x, weight = torch.randn(4, 64), torch.ones(64)
assert dlinfer.ops.rms_norm(x, weight, 1e-6).shape == (4, 64)
```

A kernel takes the op's parameters and returns what the op returns; where the torch op differs, "Torch op and kernel"
shows what a kernel takes and returns. A result may differ from the reference's in float64 by the op's tolerance
(`dlinfer.ops.registry()["rms_norm"].tolerances`). So a kernel may keep more bits where a text says that a value is
rounded, but not in an op that quantises."""


def family(op: OpSpec) -> str:
    """The folder of dlinfer/ops that defines it."""
    return op.reference.__module__.split(".")[2]


def _entry(op: OpSpec) -> str:
    parts = [f"### {op.name}", signature(op.name, op.signature()), prose(inspect.getdoc(op) or "")]
    if (kernel := inspect.signature(op.reference)) != op.signature():
        parts += ["Torch op and kernel:", _kernel(op, kernel)]
    if op.mutates:
        parts.append(f"The op writes {', '.join(f'`{name}`' for name in op.mutates)} in place.")
    return "\n\n".join(parts)


def _kernel(op: OpSpec, kernel: inspect.Signature) -> str:
    """The parameters of the torch op, and what its docstring says of those that the call does not have."""
    nothing = kernel.return_annotation is None
    shown = signature(op.name, kernel.replace(return_annotation="None") if nothing else kernel)
    doc = (inspect.getdoc(op.reference) or "").replace("Returns nothing.", "")
    behind = re.sub(r"^The torch op behind ``[\w.]+``(, which documents the arguments)?\.\s*", "", doc)
    return f"{shown}\n\n{prose(behind)}".strip()


def document() -> str:
    families: dict[str, list[OpSpec]] = {}
    for op in registry().values():
        families.setdefault(family(op), []).append(op)
    parts = [BEFORE]
    for name, ops in sorted(families.items()):
        parts += [f"## {name.capitalize()}", *(_entry(op) for op in sorted(ops, key=lambda op: op.name))]
    return page(
        "Ops", "For everybody who calls a fused op or writes a kernel for one: what each op computes.", *parts
    )
