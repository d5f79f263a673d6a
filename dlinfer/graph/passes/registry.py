"""All passes in the order in which they run."""

import functools

from dlinfer.graph.passes.check_places import CHECK_PLACES
from dlinfer.graph.passes.chosen_rows import CHOSEN_ROWS
from dlinfer.graph.passes.clean_up import CLEAN_UP
from dlinfer.graph.passes.fusion.rule import FusionRule, apply_rule
from dlinfer.graph.passes.held_checks import HELD_CHECKS
from dlinfer.graph.passes.normalise import NORMALISE
from dlinfer.graph.passes.pipeline import Pass


@functools.cache
def passes() -> tuple[Pass, ...]:
    """Clean, fuse, choose rows early, clean again."""
    from dlinfer.graph.passes.fusion.rules import RULES

    fusion = tuple(item if isinstance(item, Pass) else _as_pass(item) for item in RULES)
    return (CHECK_PLACES, NORMALISE, CLEAN_UP, HELD_CHECKS, *fusion, CHOSEN_ROWS, CLEAN_UP)


def _as_pass(rule: FusionRule) -> Pass:
    return Pass(rule.name, rule.why, functools.partial(apply_rule, rule))


def pass_names() -> tuple[str, ...]:
    """The names that the option ``passes`` takes."""
    return tuple(dict.fromkeys(item.name for item in passes() if not item.always))
