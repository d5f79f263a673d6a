"""What a vendor says that it serves, which ``dlinfer conformance`` holds it to, and how far that was proven."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of the numbers that models compute in."""


@dataclass(frozen=True)
class Claim:
    """That a vendor's own kernel answers an op.

    dtypes: of the samples that it answers. in_part: calls of these dtypes may be declined, and the reference answers
    them; otherwise a declined sample breaks the claim.
    """

    dtypes: tuple[torch.dtype, ...] = DTYPES
    in_part: bool = False


Claims = Mapping[str, Claim]
"""Op name -> claim. What is not named is not claimed."""


class Proof(StrEnum):
    """How far a vendor's kernel of an op was proven, strongest first; the table is docs/reference/ops_by_vendor.md."""

    RUNTIME = "real runtime"
    """It ran on the vendor's own runtime, and its results met the reference."""
    DOCUMENTS = "documents"
    """The vendor's binaries declare what it calls; its results met the reference on a simulation that computes and
    refuses what the vendor's documents say."""
    SCHEMA = "true schema"
    """The vendor's binaries declare what it calls; what that computes is known from how it is used elsewhere."""
    TRANSCRIBED = "transcribed schema"
    """It calls what the vendor's published sources declare, copied by hand; results are of a simulation."""
    STAND_IN = "stand-in"
    """It ran against a stand-in alone, whose signatures have no published source."""
    NONE = "none"
    """It leans on the vendor's own kernel of a torch op, or nothing of it was run."""


Proofs = Mapping[str, Proof]
"""Op name -> how far its kernel was proven, for every op that the vendor has a kernel of."""
