"""The list of passes, in their order."""

import functools

from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
from dlinfer.graph.passes.fusion.rule import FusionRule, apply_rule
from dlinfer.graph.passes.hoist_row_selection import HOIST_ROW_SELECTION
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.redundant_asserts import REDUNDANT_ASSERTS
from dlinfer.graph.passes.remove_noops import REMOVE_NOOPS
from dlinfer.graph.passes.select_bounds import SELECT_BOUNDS


@functools.cache
def passes() -> tuple[Pass, ...]:
    """Clean up, fuse, hoist row selections, clean up again."""
    from dlinfer.graph.passes.fusion.rules import RULES

    fusion = tuple(item if isinstance(item, Pass) else _as_pass(item) for item in RULES)
    return (SELECT_BOUNDS, REMOVE_NOOPS, CSE, DCE, REDUNDANT_ASSERTS, *fusion, HOIST_ROW_SELECTION, CSE, DCE)


def _as_pass(rule: FusionRule) -> Pass:
    return Pass(rule.name, rule.why, functools.partial(apply_rule, rule))


def pass_names() -> tuple[str, ...]:
    """The names that the option ``passes`` takes."""
    return tuple(dict.fromkeys(item.name for item in passes() if not item.always))
