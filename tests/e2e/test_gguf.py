"""GGUF files through unmodified LMDeploy: tokens and logits equal transformers' on the numbers that ``gguf`` reads.

In float32, where no rounding of weights and activations hides an error.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models import tokenizer
from examples.tiny_models.build import REFERENCE, STAMP
from tests.e2e.cell_checks import check_decisive, check_logits, compare_tokens
from tests.e2e.cell_jobs import SCORED
from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab
from tests.e2e.matrix import STRICT
from tests.framework.lmdeploy_ext.gguf import gguf_files
from tests.framework.lmdeploy_ext.gguf.gguf_files import Type

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1000)]


@dataclass(frozen=True)
class Case:
    """One file, eagerly or as a graph. kind: the type of its matrices; empty: those of Q4_K_M."""

    family: str
    eager: bool
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.family}-{self.kind or 'mixed'}-{'eager' if self.eager else 'graph'}"


GATE = [Case("llama", eager=False), Case("qwen3_moe", eager=True)]
REST = [
    *(Case(family, eager) for family in gguf_files.FAMILIES for eager in (True, False)),
    *(Case("qwen2", True, kind) for kind in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K".split()),
    *(Case("mixtral", False, kind) for kind in ("Q4_0", "Q8_0", "BF16")),
]

GAINS = {"gemma": 4.0, "gemma2": 4.0, "gemma3": 4.0}
"""Family -> how much larger its weights are than others', so that its tokens differ from each other."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def build(folder: Path, case: Case) -> Path:
    """A folder with model.gguf, and transformers' model of the same numbers under ``REFERENCE``."""
    made = folder / f"{case.family}-{case.kind or 'mixed'}"
    if made.exists():
        return made
    (made / REFERENCE).mkdir(parents=True)
    choose = gguf_files.of_type(getattr(Type, case.kind)) if case.kind else gguf_files.mixed
    more: dict[str, Any] = {"initializer_range": 0.06 * GAINS[case.family]} if case.family in GAINS else {}
    model = gguf_files.build(case.family, made / "model.gguf", choose, **more)
    model.save_pretrained(made / REFERENCE)
    for place in (made, made / REFERENCE):
        tokenizer.train().save_pretrained(place)
    digest = hashlib.sha256((made / "model.gguf").read_bytes() + Path(gguf_files.__file__).read_bytes())
    (made / STAMP).write_text(json.dumps({"fingerprint": digest.hexdigest()[:16]}))
    return made


def check(lab: Lab, folder: Path, case: Case) -> EngineRun:
    made = build(folder, case)
    prompts = lab.prompts(made)
    hf = lab.reference(made, prompts=prompts, max_new_tokens=NEW_TOKENS, score_continued=SCORED)
    scored = [[*hf[f"prompt_{i}"].tolist(), *hf[f"tokens_{i}"].tolist()] for i in SCORED]
    gen = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    steps = [
        {"name": "batch", "kind": "call", "prompts": prompts, "gen": gen},
        {"name": "logits", "kind": "teacher_forced", "sequences": scored},
    ]
    run = lab.engine(made / "model.gguf", steps, environment=STRICT, dtype="float32", eager_mode=case.eager)
    failures = check_decisive(hf) + compare_tokens("batch", run, hf, "float32")
    failures += check_logits("logits", run, [hf[f"logits_{i}"] for i in range(len(SCORED))], "float32")
    assert not failures, "\n".join(failures)
    assert case.eager == (run["graphs"]["steps"] == 0)
    assert ("stay in blocks" in run.log) == (case.kind not in ("F32", "F16", "BF16"))
    return run


@pytest.mark.parametrize("case", GATE, ids=str)
def test_tokens_and_logits(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case not in GATE], ids=str)
def test_tokens_and_logits_of_the_others(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)
