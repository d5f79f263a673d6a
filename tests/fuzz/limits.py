"""Differences that the documentation announces: the engine, the line of docs that says so, and how a difference is
recognised as that. Nothing else is forgiven."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz import execute
from tests.fuzz.compare import Difference
from tests.fuzz.program import Program, Step


@dataclass
class Facts:
    """What happened in an eager run: steps with what their operands held."""

    nan_into: str = ""
    """The texts of all steps that read NaN."""


@dataclass(frozen=True)
class Limit:
    """engine: whose. docs: the line that says so, word for word. explains: whether it is the cause of a difference."""

    engine: str
    docs: str
    explains: Callable[[Program, Difference, Facts], bool]


_NAN_LOST = re.compile(
    r"relu|clamp|maximum|minimum|\bmax|\bmin|amax|amin|hardtanh|hardswish|hardsigmoid|aminmax|fmax|fmin"
)

LIMITS = (
    Limit(
        "onnxruntime",
        "dlinfer's gated activations keep the kernel QuickGelu, which is right to the tolerance of these ops",
        lambda program, difference, facts: (
            difference.kind in ("value", "memory")
            and any(re.search("silu_mul|silu_and_mul|fused_moe", step.text) for step in program.steps)
        ),
    ),
    Limit(
        "openvino",
        "NaN does not come through `relu`, `clamp`, `maximum`, `minimum` and `max` as in torch",
        lambda program, difference, facts: (
            difference.kind in ("value", "memory") and bool(_NAN_LOST.search(facts.nan_into))
        ),
    ),
    Limit(
        "openvino",
        "`exp` is infinite from 88.38 on, where torch's is from 88.73 on",
        lambda program, difference, facts: (
            "inf in place of" in difference.detail and any("exp" in step.text for step in program.steps)
        ),
    ),
    Limit(
        "openvino",
        "The slots that the model was given must be these; each run checks them first, and the blocks and lengths too,"
        " and raises `OpArgumentError` before anything is written",
        lambda program, difference, facts: (
            (difference.kind, difference.what) == ("error", "OpArgumentError")
            and any("paged" in step.text for step in program.steps)
        ),
    ),
)


def explains(program: Program, engine: str, difference: Difference) -> str:
    """The line of docs that announces a difference; empty where none does."""
    mine = [limit for limit in LIMITS if limit.engine == engine]
    facts = _facts(program) if mine else Facts()
    return next((limit.docs for limit in mine if limit.explains(program, difference, facts)), "")


def _facts(program: Program) -> Facts:
    facts = Facts()
    model, kept = execute.module(program)
    execute.calls(program, execute.interpreted(program, model, make=_noting(facts)), kept, watch=False)
    return facts


def _noting(facts: Facts) -> Callable[..., Any]:
    def make(step: Step, values: Mapping[str, Any], names: dict[str, Any], widen: bool) -> Any:
        operands = [values[name] for name in step.uses]
        text = step.line
        for one in operands:
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel():
                facts.nan_into += f"{text}\n" if bool(one.isnan().any()) else ""
        return execute.run_step(step, values, names, widen)

    return make


def undocumented(text: str) -> list[str]:
    """The lines that limits name and that the text of the docs lacks: their limits are to go."""
    flat = re.sub(r"\s+", " ", text)
    return [limit.docs for limit in LIMITS if limit.docs not in flat]
