"""A vendor's claims, which ``dlinfer conformance`` checks, and how far its kernels were tested."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that models compute in."""


@dataclass(frozen=True)
class Claim:
    """A vendor's claim that its own kernel serves an op.

    dtypes: of the samples that the kernel serves. in_part: the kernel may decline calls of these dtypes, and the
    reference runs them; otherwise a declined sample breaks the claim.
    """

    dtypes: tuple[torch.dtype, ...] = DTYPES
    in_part: bool = False


Claims = Mapping[str, Claim]
"""Op name -> claim. An op that is missing is not claimed."""


class Proof(StrEnum):
    """How far a vendor's kernel of an op was tested, strongest first; the table is docs/reference/ops_by_vendor.md."""

    RUNTIME = "real runtime"
    """It ran on the vendor's own runtime, and its results matched the reference."""
    DOCUMENTS = "documents"
    """The vendor's binaries declare the ops it calls. Its results matched the reference on a simulation that computes
    and refuses as the vendor's documents say."""
    SCHEMA = "true schema"
    """The vendor's binaries declare the ops it calls; their meaning is inferred from other projects that use them."""
    TRANSCRIBED = "transcribed schema"
    """The vendor's published sources declare the ops it calls, copied by hand; results come from a simulation."""
    STAND_IN = "stand-in"
    """It ran only against a stand-in, with signatures that no published source confirms."""
    NONE = "none"
    """It uses the vendor's own kernel of a torch op, or no part of it was run."""


Proofs = Mapping[str, Proof]
"""Op name -> how far the vendor's kernel was tested, for every op that has one."""
