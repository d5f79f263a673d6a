"""Folders whose configuration says unusual things: logits are transformers', from another process, or the folder is
refused by name before weights load.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.preflight.check import preflight
from examples.tiny_models.build import STAMP
from examples.tiny_models.tokenizer import EOS
from tests.e2e.cell_checks import LOGIT_TOLERANCE
from tests.e2e.harness import Lab
from tests.e2e.matrix import STRICT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

WEIGHTS = "model.safetensors"
# With the token that pads, which ends texts too.
SEQUENCES = [[5, 90, EOS, 17, 300, EOS, EOS, 44, 8, 71], list(range(100, 140))]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    """A family's folder, changed. tensors: changes its tensors in place."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[dict[str, Tensor]], object] = lambda tensors: None
    without: tuple[str, ...] = ()


def own_head(tensors: dict[str, Tensor]) -> None:
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0) * 0.5


def same_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def no_head(tensors: dict[str, Tensor]) -> None:
    tensors.pop("lm_head.weight", None)


EQUAL = {
    "tied, a head of its own": Case("llama", {"tie_word_embeddings": True}, own_head),
    "tied, a head of its own, qwen2": Case("qwen2", {"tie_word_embeddings": True}, own_head),
    "tied, the same head": Case("llama", {"tie_word_embeddings": True}, same_head),
    "tied, no head": Case("llama", {"tie_word_embeddings": True}, no_head),
    "not tied, a head": Case("qwen2", {"tie_word_embeddings": False}, own_head),
    "no word of ties, a head": Case("llama", {}, own_head, without=("tie_word_embeddings",)),
    "the padding token in a prompt": Case("qwen2"),
    "half of a head turned": Case("llama", {"partial_rotary_factor": 0.5}),
    "half of a head turned, in the parameters": Case(
        "llama", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
    ),
    "half of a head turned, qwen3": Case("qwen3", {"partial_rotary_factor": 0.5}),
    "swish": Case("llama", {"hidden_act": "swish"}),
}
"""What transformers answers too."""


def folder_of(lab: Lab, case: Case, folder: Path) -> Path:
    shutil.copytree(lab.model(case.family), folder)
    tensors = load_file(folder / WEIGHTS)
    case.tensors(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text()) | case.config
    file.write_text(json.dumps({name: config[name] for name in config if name not in case.without}))
    (folder / STAMP).write_text(f"{folder.name}, {(folder / STAMP).read_text()}")  # which answers are kept by
    return folder


def test_logits_are_those_of_transformers(lab: Lab, tmp_path: Path) -> None:
    folders = {name: folder_of(lab, case, tmp_path / name) for name, case in EQUAL.items()}
    said = lab.references([(folder, {"score": SEQUENCES}) for folder in folders.values()])
    steps = [{"name": "logits", "kind": "teacher_forced", "sequences": SEQUENCES}]
    options = {"dtype": "float32", "eager_mode": True}
    runs = lab.engines([(folder, steps, options) for folder in folders.values()], environment=STRICT)
    wrong = {}
    for name, hf, run in zip(folders, said, runs, strict=True):
        assert run["logits"]
        differences = [
            np.abs(run.logits[f"logits/{i}"] - hf[f"logits_{i}"]).max() for i in range(len(SEQUENCES))
        ]
        if max(differences) > LOGIT_TOLERANCE["float32"]:
            wrong[name] = max(differences)
    assert not wrong


@pytest.mark.parametrize("setting", ["int8", "int4", "head"])
def test_a_head_of_its_own_when_weights_are_packed(setting: str, lab: Lab, tmp_path: Path) -> None:
    """Tied by the flag with a head of its own: as the same folder whose flag says that nothing is tied."""
    packs = {"DLINFER_CPU_HEAD": "int8"} if setting == "head" else {"DLINFER_CPU_WEIGHTS": setting}
    tied = folder_of(lab, EQUAL["tied, a head of its own"], tmp_path / "tied")
    apart = folder_of(lab, Case("llama", {"tie_word_embeddings": False}, own_head), tmp_path / "apart")
    steps = [{"name": "logits", "kind": "teacher_forced", "sequences": SEQUENCES}]
    options = {"dtype": "float32", "eager_mode": True}
    got, want = lab.engines(
        [(folder, steps, options) for folder in (tied, apart)], environment=STRICT | packs
    )
    assert got["logits"] == want["logits"]
    for i in range(len(SEQUENCES)):
        np.testing.assert_array_equal(got.logits[f"logits/{i}"], want.logits[f"logits/{i}"])


REFUSED = {
    "gelu": (Case("llama", {"hidden_act": "gelu"}), "hidden_act='gelu' of llama"),
    "relu": (Case("qwen2", {"hidden_act": "relu"}), "hidden_act='relu' of qwen2"),
    "no activation at all": (Case("mistral_window", {"hidden_act": "frob"}), "hidden_act='frob' of mistral"),
    "half of a scaled head turned": (
        Case("llama_linear", {"partial_rotary_factor": 0.5}),
        "partial_rotary_factor=0.5 with rope type 'linear'",
    ),
    "no head, not tied": (Case("llama", {"tie_word_embeddings": False}, no_head), "lm_head.weight"),
    "no head, no word of ties": (
        Case("llama", {}, no_head, without=("tie_word_embeddings",)),
        "lm_head.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_preflight(name: str, lab: Lab, tmp_path: Path) -> None:
    case, words = REFUSED[name]
    (refusal,) = preflight(folder_of(lab, case, tmp_path / "model"), "cpu", session_len=128).refusals
    assert words in refusal.text


def test_refused_by_the_engine(lab: Lab, tmp_path: Path) -> None:
    folder = folder_of(lab, REFUSED["gelu"][0], tmp_path / "model")
    words = "UnsupportedFeatureError: hidden_act='gelu' of llama, which LMDeploy ignores"
    with pytest.raises(
        AssertionError, match=words
    ):  # LMDeploy prints what its checks meet, and ends the process
        lab.engine(folder, [], eager_mode=True)
