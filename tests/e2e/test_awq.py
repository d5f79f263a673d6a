"""AWQ checkpoints: tokens and logits of unmodified LMDeploy equal transformers' on the weights that they stand for.

In float32, where no rounding of activations hides an error of a weight: scales and biases stay float16, as stored.
"""

from typing import Any

import pytest

from tests.e2e.cell_checks import check_decisive, check_graphs, check_logits, compare_tokens
from tests.e2e.cell_jobs import SCORED
from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab
from tests.e2e.matrix import STRICT, Cell

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

QUICK = [Cell("qwen2_awq", 0, "float32", "base", "graph"), Cell("llama_awq", 0, "float32", "base", "eager")]
FULL = [Cell("qwen2_awq", 0, "float32", "base", "eager"), Cell("llama_awq", 0, "float32", "base", "graph")]
OPENVINO = [Cell(family, 0, "float32", "base", "graph", "openvino") for family in ("qwen2_awq", "llama_awq")]
OTHER_DTYPES = ("auto", "bfloat16")
"""What LMDeploy takes an AWQ model for, float16, and another that is asked for."""


def steps(lab: Lab, cell: Cell) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    model = lab.model(cell.family)
    prompts = lab.prompts(model)
    hf = lab.reference(model, prompts=prompts, max_new_tokens=NEW_TOKENS, score_continued=SCORED)
    many = {"prompts": prompts, "gen": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}}
    scored = [[*hf[f"prompt_{i}"].tolist(), *hf[f"tokens_{i}"].tolist()] for i in SCORED]
    asked = [
        {"name": "batch", "kind": "call", **many},
        {"name": "staggered", "kind": "staggered", "after": 5, **many},
        {"name": "logits", "kind": "teacher_forced", "sequences": scored},
    ]
    return asked, hf


def check(cell: Cell, run: EngineRun, hf: dict[str, Any]) -> list[str]:
    failures = check_decisive(hf) + check_graphs(run, cell)
    failures += compare_tokens("batch", run, hf, "float32") + compare_tokens("staggered", run, hf, "float32")
    return failures + check_logits("logits", run, [hf[f"logits_{i}"] for i in range(len(SCORED))], "float32")


def ask(lab: Lab, cells: list[Cell]) -> list[str]:
    """The failures of some cells, whose engines share a process."""
    asked = [steps(lab, cell) for cell in cells]
    starts = [
        (lab.model(cell.family), of_lmdeploy, {"dtype": "float32", "eager_mode": cell.mode == "eager"})
        for cell, (of_lmdeploy, _) in zip(cells, asked, strict=True)
    ]
    runs = lab.engines(starts, environment=STRICT | cells[0].environment)
    return [
        f"{cell.name}: {failure}"
        for cell, run, (_, hf) in zip(cells, runs, asked, strict=True)
        for failure in check(cell, run, hf)
    ]


def test_tokens_and_logits_equal_transformers(lab: Lab) -> None:
    failures = ask(lab, QUICK)
    assert not failures, "\n".join(failures)


@pytest.mark.full
@pytest.mark.parametrize("cells", [FULL, OPENVINO], ids=["inductor", "openvino"])
def test_the_other_modes(lab: Lab, cells: list[Cell]) -> None:
    if cells[0].missing:
        pytest.skip(cells[0].missing)
    failures = ask(lab, cells)
    assert not failures, "\n".join(failures)


@pytest.mark.full
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_16_bit_activations_differ_by_their_rounding(lab: Lab, eager: bool) -> None:
    """A few dozen roundings of hidden states to 11 or 8 bits are all that differs from float32."""
    asked, hf = steps(lab, QUICK[0])
    model = lab.model(QUICK[0].family)
    starts = [
        (model, asked[-1:], {"dtype": dtype, "model_format": "awq", "eager_mode": eager})
        for dtype in OTHER_DTYPES
    ]
    for dtype, run in zip(OTHER_DTYPES, lab.engines(starts, environment=STRICT), strict=True):
        for i in range(len(SCORED)):
            run["logits"]
            error = abs(run.logits[f"logits/{i}"] - hf[f"logits_{i}"])
            unit = 2.0**-11 if dtype == "auto" else 2.0**-8
            assert error.mean() < 8 * unit * abs(hf[f"logits_{i}"]).mean(), (dtype, error.max())
            assert error.max() > unit / 8, f"{dtype}: these are float32 logits"
