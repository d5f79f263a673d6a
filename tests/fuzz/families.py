"""The kinds of steps that a program is drawn from."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz import families_access, families_compute, families_fused, families_state
from tests.fuzz.generate import Draft
from tests.fuzz.program import Step


@dataclass(frozen=True)
class Family:
    """One kind of step. weight: how often it is drawn. draw: a step that may or may not fit its operands."""

    name: str
    weight: float
    draw: Callable[[Draft], Step | None]


FAMILIES = tuple(
    Family(draw.__name__.replace("_", " ").strip(), weight, draw)
    for module in (families_compute, families_access, families_fused, families_state)
    for draw, weight in module.DRAWN.items()
)
