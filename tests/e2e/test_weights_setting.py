"""DLINFER_CPU_WEIGHTS: tokens and logits are those of the folder that was quantised before, bit for bit.

Of dense models that folder is what ``dlinfer quantise`` writes. It does not take models with experts, whose folder is
written here, by the same rounding.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dlinfer.framework.lmdeploy_ext.conversion.formats import W8A8, AwqInt4, Format
from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab
from tests.e2e.test_quantise_command import make, quantise

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1000)]

SCORED = (3, 20, 80)


@dataclass(frozen=True)
class Case:
    """One model and value of the setting, eagerly or as a graph."""

    family: str
    bits: str
    eager: bool
    dtype: str = "float32"
    head: str = ""
    is_tied: bool = False

    def __str__(self) -> str:
        mode = "eager" if self.eager else "graph"
        words = (self.family, "tied" if self.is_tied else "", self.bits, mode, self.dtype, self.head)
        return "-".join(word for word in words if word)


BITS = ("int8", "int4")
GATE = [Case("qwen2", "int4", eager=False, is_tied=True), Case("llama", "int8", eager=True)]
REST = [
    *(Case(family, bits, eager) for family in ("llama", "qwen2") for bits in BITS for eager in (True, False)),
    *(Case(family, bits, True, "bfloat16") for family in ("qwen3", "mistral") for bits in BITS),
    Case("qwen2", "int8", eager=False, dtype="bfloat16"),
    Case("qwen3", "int8", eager=False, is_tied=True, dtype="bfloat16"),
    Case("llama", "int4", eager=True, is_tied=True),
    Case("llama", "int4", eager=False, head="kept"),
    Case("qwen2", "int8", eager=True, head="kept", is_tied=True),
    Case("mixtral", "int8", eager=True),
    Case("mixtral", "int4", eager=True),
    Case("qwen2_moe", "int4", eager=False),
    Case("qwen3_moe", "int4", eager=True),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights-setting")


def models(lab: Lab, folder: Path, case: Case) -> tuple[Path, Path]:
    """The model in floats, and quantised by hand."""
    floats, quantised = folder / case.family, folder / f"{case.family}-{case.bits}"
    if "moe" in case.family or case.family == "mixtral":
        floats = lab.model(case.family)
        if not quantised.exists():
            write(floats, quantised, case.bits)
        return floats, quantised
    if not floats.exists():
        make(case.family, floats, torch.bfloat16, "300KB" if case.family == "qwen2" else "50GB")
    if not quantised.exists():
        form = ["w8a8"] if case.bits == "int8" else ["awq-int4", "--group-size", "128"]
        quantise(floats, quantised, "--format", *form)
    if case.is_tied:
        return tied(floats), tied(quantised)
    return floats, quantised


def tied(folder: Path) -> Path:
    """The same model with its projection tied, which its file still has."""
    out = folder.with_name(f"{folder.name}-tied")
    if not out.exists():
        shutil.copytree(folder, out)
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return out


def write(floats: Path, out: Path, bits: str) -> None:
    """A folder with experts, quantised."""
    shutil.copytree(floats, out)
    config = json.loads((out / "config.json").read_text())
    sizes = [config[name] for name in config if name.endswith("intermediate_size")] + [config["hidden_size"]]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes += [head * config["num_key_value_heads"], head * config["num_attention_heads"]]
    form: Format = W8A8() if bits == "int8" else AwqInt4(int(np.gcd.reduce([128, *sizes])))
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": form.config()}))
    made: dict[str, torch.Tensor] = {}
    for name, weight in load_file(floats / "model.safetensors").items():
        if ".layers." in name and weight.ndim == 2 and not name.endswith("gate.weight"):
            layer = name.removesuffix("weight")
            made |= {f"{layer}{part}": numbers for part, numbers in form.quantise(weight).items()}
        else:
            made[name] = weight
    save_file(made, out / "model.safetensors", {"format": "pt"})


def serve(lab: Lab, model: Path, case: Case, environment: dict[str, str]) -> EngineRun:
    prompts = lab.prompts(model)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    sequences = [[(7 * i + length) % (size - 10) + 5 for i in range(length)] for length in SCORED]
    gen = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    steps = [
        {"name": "batch", "kind": "call", "prompts": prompts, "gen": gen},
        {"name": "logits", "kind": "teacher_forced", "sequences": sequences},
    ]
    environment = {"DLINFER_FALLBACK": "error", **environment}
    return lab.engine(model, steps, environment=environment, dtype=case.dtype, eager_mode=case.eager)


def check(lab: Lab, folder: Path, case: Case) -> None:
    floats, quantised = models(lab, folder, case)
    head = {"DLINFER_CPU_HEAD": case.head} if case.head else {}
    want = serve(lab, quantised, case, {"DLINFER_CPU_HEAD": case.head or "int8"})
    got = serve(lab, floats, case, {"DLINFER_CPU_WEIGHTS": case.bits, **head})
    assert got.tokens("batch") == want.tokens("batch")
    assert got["logits"] == want["logits"]  # their shapes, or what a step raised
    for i in range(len(SCORED)):
        np.testing.assert_array_equal(got.logits[f"logits/{i}"], want.logits[f"logits/{i}"])
    assert case.eager == (got["graphs"]["steps"] == 0)
    if not case.eager:
        assert {outcome for _, outcome, _ in got["graphs"]["phases"]} <= {"compiled", "loaded"}


@pytest.mark.parametrize("case", GATE, ids=str)
def test_the_same_bits_as_a_quantised_folder(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case not in GATE], ids=str)
def test_the_others(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)
