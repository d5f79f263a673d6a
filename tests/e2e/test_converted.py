"""GPTQ and compressed-tensors of 4 bits: tokens and logits of unmodified LMDeploy equal transformers' on the weights
that they stand for, in float32, where no rounding of activations hides an error of a weight.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import packed_model
from tests.e2e.cell_checks import check_decisive, check_logits, compare_tokens
from tests.e2e.cell_jobs import SCORED
from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab
from tests.e2e.matrix import STRICT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1000)]


@dataclass(frozen=True)
class Case:
    """One checkpoint, eagerly or as a graph."""

    family: str
    method: str
    eager: bool

    def __str__(self) -> str:
        return f"{self.family}-{self.method}-{'eager' if self.eager else 'graph'}"


GATE = [Case("llama", "gptq", eager=False), Case("qwen2", "w4a16_channel", eager=True)]
REST = [
    Case(family, method, eager)
    for family in packed_model.FAMILIES
    for method in packed_model.METHODS
    for eager in (True, False)
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("converted")


def model(folder: Path, case: Case) -> Path:
    made = folder / f"{case.family}-{case.method}"
    if not made.exists():
        packed_model.build(case.family, case.method, made)
    return made


def check(lab: Lab, folder: Path, case: Case) -> None:
    compare(lab, model(folder, case), case.eager)


def compare(lab: Lab, made: Path, eager: bool) -> EngineRun:
    prompts = lab.prompts(made)
    hf = lab.reference(made, prompts=prompts, max_new_tokens=NEW_TOKENS, score_continued=SCORED)
    scored = [[*hf[f"prompt_{i}"].tolist(), *hf[f"tokens_{i}"].tolist()] for i in SCORED]
    gen = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    steps = [
        {"name": "batch", "kind": "call", "prompts": prompts, "gen": gen},
        {"name": "logits", "kind": "teacher_forced", "sequences": scored},
    ]
    run = lab.engine(made, steps, environment=STRICT, dtype="float32", eager_mode=eager)
    failures = check_decisive(hf) + compare_tokens("batch", run, hf, "float32")
    failures += check_logits("logits", run, [hf[f"logits_{i}"] for i in range(len(SCORED))], "float32")
    assert not failures, "\n".join(failures)
    assert eager == (run["graphs"]["steps"] == 0)
    return run


@pytest.mark.parametrize("case", GATE, ids=str)
def test_tokens_and_logits(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case not in GATE], ids=str)
def test_tokens_and_logits_of_the_others(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)


@pytest.mark.full
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_experts_of_gpt_oss_in_mxfp4(lab: Lab, folder: Path, eager: bool) -> None:
    made = folder / "mxfp4"
    if not made.exists():
        packed_model.build_mxfp4(made)
    compare(lab, made, eager)
