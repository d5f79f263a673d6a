"""A vendor's claims, which ``dlinfer conformance`` checks, and how far its kernels were tested."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # dlinfer serve imports this module, and needs no torch
    import torch


def compute_dtypes() -> "tuple[torch.dtype, ...]":
    """Return the dtypes that models compute in."""
    import torch

    return torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Claim:
    """A vendor's claim that its own kernel serves an op. It says nothing of the vendor's engines.

    dtypes: the dtypes of the calls that the kernel serves. Default: float32, float16 and bfloat16.
    in_part: True if the kernel may decline some of these calls, which the reference then runs. If False, a call that
        the kernel declines in the check ``values`` of ``dlinfer conformance`` is a broken claim.
    """

    dtypes: "tuple[torch.dtype, ...]" = field(default_factory=compute_dtypes)
    in_part: bool = False


Claims = Mapping[str, Claim]
"""Maps an op's name to the vendor's claim. An op that is missing is not claimed."""


class Proof(StrEnum):
    """How far a vendor's kernel of an op was tested, strongest first; the table is docs/reference/ops_by_vendor.md."""

    RUNTIME = "real runtime"
    """The kernel ran on the vendor's own runtime, and its results matched the reference."""
    DOCUMENTS = "documents"
    """The vendor's binaries declare the ops that the kernel calls. Its results matched the reference on a simulation
    that computes and refuses as the vendor's documents say.
    """
    SCHEMA = "true schema"
    """The vendor's binaries declare the ops that the kernel calls. Their meaning is inferred from other projects."""
    TRANSCRIBED = "transcribed schema"
    """The vendor's published sources declare the ops that the kernel calls. They were copied by hand, and simulated."""
    STAND_IN = "stand-in"
    """The kernel ran only against a stand-in, whose signatures no published source confirms."""
    NONE = "none"
    """The kernel is the vendor's own kernel of a torch op, or no part of it was run."""


Proofs = Mapping[str, Proof]
"""Maps an op's name to how far the vendor's kernel was tested, for every op that has a kernel."""
