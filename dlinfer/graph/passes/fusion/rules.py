"""The list of all fusion rules, in the order of their runs."""

from dlinfer.graph.passes.functionalize_writes import FUNCTIONALIZE_WRITES
from dlinfer.graph.passes.fusion.add_rms_norm import ADD_RMS_NORM
from dlinfer.graph.passes.fusion.gated_activation import GATED_GELU, GATED_SILU
from dlinfer.graph.passes.fusion.merged_linears import MERGED_LINEARS
from dlinfer.graph.passes.fusion.moe import MOE_EXPERTS, MOE_GATING
from dlinfer.graph.passes.fusion.rms_norm import RMS_NORM
from dlinfer.graph.passes.fusion.rotary import ROTARY
from dlinfer.graph.passes.fusion.rotary_interleaved import ROTARY_INTERLEAVED
from dlinfer.graph.passes.fusion.sdpa_gqa import (
    GROUPED_ATTENTION,
    ONE_TOKEN_ATTENTION,
    WRITTEN_OUT_ATTENTION,
)

RULES = (
    FUNCTIONALIZE_WRITES,
    RMS_NORM,
    ADD_RMS_NORM,
    ROTARY,
    ROTARY_INTERLEAVED,
    WRITTEN_OUT_ATTENTION,
    GROUPED_ATTENTION,
    ONE_TOKEN_ATTENTION,
    MOE_GATING,
    MOE_EXPERTS,
    MERGED_LINEARS,
    GATED_SILU,
    GATED_GELU,
)
