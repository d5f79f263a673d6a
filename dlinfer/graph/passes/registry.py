"""The list of passes, in their order."""

from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
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
from dlinfer.graph.passes.hoist_row_selection import HOIST_ROW_SELECTION
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.redundant_asserts import REDUNDANT_ASSERTS
from dlinfer.graph.passes.remove_noops import REMOVE_NOOPS
from dlinfer.graph.passes.select_bounds import SELECT_BOUNDS

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
"""The fusion rules, in the order of their runs."""


def passes() -> tuple[Pass, ...]:
    """Return the passes in their order: clean up, fuse, hoist row selections, clean up again."""
    return (SELECT_BOUNDS, REMOVE_NOOPS, CSE, DCE, REDUNDANT_ASSERTS, *RULES, HOIST_ROW_SELECTION, CSE, DCE)


def pass_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.name for item in passes() if not item.always))
