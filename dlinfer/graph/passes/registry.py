"""The list of passes, in their order."""

import functools

from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
from dlinfer.graph.passes.hoist_row_selection import HOIST_ROW_SELECTION
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.redundant_asserts import REDUNDANT_ASSERTS
from dlinfer.graph.passes.remove_noops import REMOVE_NOOPS
from dlinfer.graph.passes.select_bounds import SELECT_BOUNDS


@functools.cache
def passes() -> tuple[Pass, ...]:
    """Return the passes in their order: clean up, fuse, hoist row selections, clean up again."""
    from dlinfer.graph.passes.fusion.rules import RULES

    return (SELECT_BOUNDS, REMOVE_NOOPS, CSE, DCE, REDUNDANT_ASSERTS, *RULES, HOIST_ROW_SELECTION, CSE, DCE)


def pass_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.name for item in passes() if not item.always))
