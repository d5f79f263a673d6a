"""Differences that the documentation announces: the engine, the line of docs that says so, and how a difference is
recognised as that. Nothing else is forgiven."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.compare import Difference
from tests.fuzz.program import Program


@dataclass(frozen=True)
class Limit:
    """engine: whose. docs: the line that says so, word for word. explains: whether it is the cause of a difference."""

    engine: str
    docs: str
    explains: Callable[[Program, Difference], bool]


def _no_score(program: Program, difference: Difference) -> bool:
    return "nan in place of 0.0" in difference.detail and any(
        "scaled_dot_product_attention" in step.text for step in program.steps
    )


_NO_SCORE = "A query of infinite numbers, or over infinite keys, whose scores are all -infinity gives NaN"
_NO_KEY = "A query to which no key is shown gives 0 even where a value is infinite or NaN"


def _no_key(program: Program, difference: Difference) -> bool:
    return "0.0 in place of nan" in difference.detail and any(
        "scaled_dot_product_attention" in step.text and "mask" in step.text for step in program.steps
    )


LIMITS = (
    Limit("openvino", _NO_KEY, _no_key),
    Limit("openvino", _NO_SCORE, _no_score),
    Limit("onnxruntime", _NO_SCORE, _no_score),
    Limit(
        "openvino",
        "`exp` is infinite from 88.38 on, where torch's is from 88.73 on",
        lambda program, difference: (
            "inf in place of" in difference.detail and any("exp" in step.text for step in program.steps)
        ),
    ),
    Limit(
        "openvino",
        "The slots that the model was given must be these; each run checks them first, and the blocks and lengths too,"
        " and raises `OpArgumentError` before anything is written",
        lambda program, difference: (
            (difference.kind, difference.what) == ("error", "OpArgumentError")
            and any("paged" in step.text for step in program.steps)
        ),
    ),
)


def explains(program: Program, engine: str, difference: Difference) -> str:
    """The line of docs that announces a difference; empty where none does."""
    mine = (limit for limit in LIMITS if limit.engine == engine)
    return next((limit.docs for limit in mine if limit.explains(program, difference)), "")


def undocumented(text: str) -> list[str]:
    """The lines that limits name and that the text of the docs lacks: their limits are to go."""
    flat = re.sub(r"\s+", " ", text)
    return [limit.docs for limit in LIMITS if limit.docs not in flat]
