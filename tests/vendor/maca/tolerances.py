"""How far from the reference in float64 the vendor's results may be: as the ops say, with one exception."""

from dataclasses import replace

import torch

from dlinfer.ops import OpSpec
from dlinfer.ops.core.spec import Tolerance

ROUNDED = {"weight_quant_matmul": 3.0}
"""Op -> how many times its tolerance: awq_gemm rounds weights to 16 bits, the op's tolerance admits none that is."""


def of(op: OpSpec, dtype: torch.dtype) -> Tolerance:
    """The tolerance of an op here."""
    times, known = ROUNDED.get(op.name, 1.0), op.tolerances[dtype]
    return replace(known, rtol=known.rtol * times, atol=known.atol * times)
