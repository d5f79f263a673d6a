"""Quantised checkpoints through unmodified LMDeploy, against transformers' models with the quantisation simulated.

Rounding to 8 bits makes whole steps of differences in a last digit: where a value lies halfway between two numbers, the
two sides may take another one each. That happens to few values, so that rows of logits are equal to the last digits of
float32 until it does, and from there on a step of one activation apart, which later tokens attend to.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.e2e import quantised_model
from tests.e2e.harness import EngineRun, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1000)]

NEW = 24
LAST_DIGITS = 2e-4  # of logits of about 10
STEP = 1.0  # what a step of an activation, and what follows from it, may change in a logit


@dataclass(frozen=True)
class Case:
    """One checkpoint, eagerly or as a graph."""

    family: str
    method: str
    eager: bool
    is_compressed: bool = False
    """Whether the files are compressed-tensors'."""

    @property
    def model(self) -> str:
        return f"{self.family}-{self.method}{'-compressed' if self.is_compressed else ''}"

    def __str__(self) -> str:
        return f"{self.model}-{'eager' if self.eager else 'graph'}"


GATE = [
    Case("llama", "int8", eager=True),
    Case("llama", "blocked", eager=False),
    Case("qwen2", "int8", eager=False, is_compressed=True),
]
REST = [
    Case(family, method, eager)
    for family, methods in {
        "llama": ("int8", "float8", "blocked", "static"),
        "qwen2": ("int8", "float8", "blocked", "ue8m0", "static"),
        "qwen3": ("int8", "blocked"),
        "mixtral": ("int8", "float8"),
        "qwen3_moe": ("blocked", "ue8m0", "static"),
    }.items()
    for method in methods
    for eager in (True, False)
] + [
    Case(family, method, eager, is_compressed=True)
    for family, methods in {
        "llama": quantised_model.COMPRESSED,
        "qwen2": quantised_model.COMPRESSED,
        "mixtral": ("int8", "float8"),
        "qwen3_moe": ("blocked", "static"),
    }.items()
    for method in methods
    for eager in (True, False)
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


def model(folder: Path, case: Case) -> Path:
    made = folder / case.model
    if not made.exists():
        quantised_model.build(case.family, case.method, made, case.is_compressed)
    return made


def oracle(lab: Lab, folder: Path, case: Case) -> dict[str, np.ndarray]:
    out = folder / f"{case.model}.npz"
    if not out.exists():
        job = {"model": str(model(folder, case)), "method": case.method, "prompts": ids(lab, folder, case)}
        alone = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        lab._processes.ask("tests.e2e.quantised_job", job | {"new": NEW, "out": str(out)}, 500, alone)
    with np.load(out) as arrays:
        return dict(arrays)


def ids(lab: Lab, folder: Path, case: Case) -> list[list[int]]:
    tokenizer = lab.tokenizer(model(folder, case))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in lab.prompts(model(folder, case))]


def engine(lab: Lab, folder: Path, case: Case, want: dict[str, np.ndarray]) -> EngineRun:
    prompts = lab.prompts(model(folder, case))
    texts = [[*prompt, *want[f"tokens_{i}"].tolist()] for i, prompt in enumerate(ids(lab, folder, case))]
    gen = {"max_new_tokens": NEW, "ignore_eos": True, "top_k": 1}
    steps = [
        {"name": "batch", "kind": "call", "prompts": prompts, "gen": gen},
        {"name": "logits", "kind": "teacher_forced", "sequences": texts},
    ]
    return lab.engine(
        model(folder, case),
        steps,
        environment={"DLINFER_FALLBACK": "error"},
        dtype="float32",
        eager_mode=case.eager,
    )


def check(lab: Lab, folder: Path, case: Case) -> None:
    want = oracle(lab, folder, case)
    got = engine(lab, folder, case, want)
    got["logits"]
    rows = []
    for i in range(len(ids(lab, folder, case))):
        rows.append(np.abs(got.logits[f"logits/{i}"] - want[f"logits_{i}"]).max(-1))
        tokens, wanted = got.tokens("batch")[i], want[f"tokens_{i}"].tolist()
        if tokens != wanted:
            parted = next(
                at for at, (one, other) in enumerate(zip(tokens, wanted, strict=True)) if one != other
            )
            assert want[f"gap_{i}"][parted] < STEP / 10, (case, i, parted, want[f"gap_{i}"])
    apart = np.concatenate(rows)
    print(
        f"{case}: {(apart < LAST_DIGITS).mean():.0%} of rows to the last digits, the others within {apart.max():.2g}"
    )
    assert np.quantile(apart, 0.2) < LAST_DIGITS
    assert apart.max() < STEP
    assert case.eager == (got["graphs"]["steps"] == 0)
    if not case.eager:
        assert {outcome for _, outcome, _ in got["graphs"]["phases"]} <= {"compiled", "loaded"}


@pytest.mark.parametrize("case", GATE, ids=str)
def test_tokens_and_logits(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case not in GATE], ids=str)
def test_tokens_and_logits_of_the_others(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)
