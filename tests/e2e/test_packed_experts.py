"""Experts of 4 bits in AWQ's, GPTQ's and compressed-tensors' files: tokens and logits of unmodified LMDeploy equal
transformers' on the weights that they stand for, in float32: no rounding of activations hides an error of a weight.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import packed_experts_model
from tests.e2e.harness import Lab
from tests.e2e.test_converted import compare

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1000)]


@dataclass(frozen=True)
class Case:
    """One checkpoint, eagerly or as a graph."""

    family: str
    method: str
    eager: bool

    def __str__(self) -> str:
        return f"{self.family}-{self.method}-{'eager' if self.eager else 'graph'}"


GATE = [Case("qwen3_moe", "experts", eager=False), Case("qwen2_moe", "awq", eager=True)]
REST = [
    Case(family, method, eager)
    for family, methods in {
        "qwen3_moe": ("awq", "gptq", "gptq_sym", "w4a16", "w4a16_channel", "experts"),
        "qwen2_moe": ("awq", "gptq", "w4a16"),
        "mixtral": ("awq", "gptq", "w4a16"),
    }.items()
    for method in methods
    for eager in (True, False)
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed-experts")


def check(lab: Lab, folder: Path, case: Case) -> None:
    made = folder / f"{case.family}-{case.method}"
    if not made.exists():
        packed_experts_model.build(case.family, case.method, made)
    compare(lab, made, case.eager)


@pytest.mark.parametrize("case", GATE, ids=str)
def test_tokens_and_logits(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case not in GATE], ids=str)
def test_tokens_and_logits_of_the_others(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)
