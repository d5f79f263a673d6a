"""What a vendor says that it serves, which ``dlinfer conformance`` holds it to."""

from collections.abc import Mapping
from dataclasses import dataclass

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
