"""The table of ops by vendors with how far each kernel was proven, docs/reference/ops_by_vendor.md."""

from dlinfer.ops import registry
from dlinfer.vendor import discovery
from dlinfer.vendor.base import Vendor
from dlinfer.vendor.claims import Proof
from docs.generate.text import MARK

NAME = "ops_by_vendor.md"
MEANINGS = {
    Proof.RUNTIME: "it ran on the vendor's own runtime, and its results met the reference in float64",
    Proof.DOCUMENTS: "the vendor's binaries declare what it calls, and its results met the reference on a simulation "
    "that computes, and refuses, what the vendor's documents say",
    Proof.SCHEMA: "the vendor's binaries declare what it calls; what that computes is known from its uses elsewhere",
    Proof.TRANSCRIBED: "it calls what the vendor's published sources declare, copied by hand; results are "
    "of a simulation",
    Proof.STAND_IN: "it ran against a stand-in alone, whose signatures have no published source",
    Proof.NONE: "it leans on the vendor's own kernel of a torch op, or nothing of it was run",
}


def vendors() -> list[Vendor]:
    """Of dlinfer itself, that say how far their kernels were proven."""
    inside = [name for name in discovery.names() if discovery.get(name).proofs is not None]
    return [discovery.get(name) for name in inside if discovery.origin(name).module.startswith("dlinfer.")]  # pyright: ignore[reportOptionalMemberAccess]


def document() -> str:
    columns = [(vendor.name, vendor.proofs() if vendor.proofs else {}) for vendor in vendors()]
    heads = " | ".join(name for name, _ in columns)
    rows = "\n".join(
        f"| `{op}` | {' | '.join(str(proofs.get(op, '')) for _, proofs in columns)} |"
        for op in sorted(registry())
    )
    levels = "\n".join(f"| {level} | {MEANINGS[level]} |" for level in Proof)
    return f"""# Ops by vendor

{MARK}

For everybody who chooses a device: which vendor has a kernel for which op, and how far that kernel was proven.

An empty field has no kernel: the reference in plain torch answers, and the call is counted. With
`DLINFER_FALLBACK=error` such a call is refused. Vendors that bring graph engines only are in [Engines](engines.md).
`dlinfer doctor` shows which kernels can run on your machine.

| op | {heads} |
| --- |{" --- |" * len(columns)}
{rows}

| level | what it means |
| --- | --- |
{levels}

The pages of [Ascend](../vendors/ascend.md), [Cambricon](../vendors/camb.md) and [MetaX](../vendors/maca.md) list the
calls that a kernel refuses by name.
"""
