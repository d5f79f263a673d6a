"""DLINFER_CPU_WEIGHTS=bf12: tokens and logits are those of the model in bfloat16, bit for bit; weights are packed."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from examples.tiny_models import tokenizer, vision
from examples.tiny_models.build import REFERENCE, randomise_vectors
from examples.tiny_models.families import COMMON, STOP_IDS
from examples.tiny_models.vision_families import VISION
from tests.e2e import quantised_model, test_adapters
from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab
from tests.e2e.test_quantise_command import make
from tests.e2e.test_weights_setting import tied

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1000)]

SCORED = (3, 20, 80)
ASKED = {"DLINFER_CPU_WEIGHTS": "bf12"}


@dataclass(frozen=True)
class Case:
    """One model, eagerly or as a graph.

    packed: how many weights become BF12, head or tied table included; None: some.
    """

    family: str
    eager: bool
    is_tied: bool = False
    head: str = ""
    packed: int | None = 9

    def __str__(self) -> str:
        mode = "eager" if self.eager else "graph"
        words = (self.family, "tied" if self.is_tied else "", self.head, mode)
        return "-".join(word for word in words if word)


GATE = [Case("qwen2", eager=False, is_tied=True), Case("llama", eager=True)]
REST = [
    *(Case("qwen2", eager, is_tied) for eager in (True, False) for is_tied in (True, False)),
    *(Case("llama", eager, is_tied) for eager in (True, False) for is_tied in (True, False)),
    Case("qwen3", eager=False, is_tied=True),
    Case("mistral", eager=True),
    Case("qwen3_moe", eager=True, packed=11),
    Case("qwen3_moe", eager=False, is_tied=True, packed=11),
    Case("qwen3_5", eager=True, packed=22),
    Case("qwen3_5", eager=False, is_tied=True, packed=22),
    Case("qwen3_5", eager=True, is_tied=True, head="int8", packed=21),
    Case("qwen3_5_moe", eager=True, packed=30),
    *(Case(family, eager=True, packed=None) for family in ("gemma3_vl", "llava", "llama4", "kimi_k25")),
    *(Case(family, eager=True, packed=None) for family in ("qwen3_omni", "interns1", "interns2_preview")),
    *(Case(family, eager=False, packed=None) for family in ("gemma3_vl", "llama4", "qwen3_omni")),
    Case("llama", eager=False, head="kept", packed=8),
    Case("qwen2", eager=True, is_tied=True, head="int8", packed=8),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bf12-weights")


def make_experts(folder: Path, **more: int) -> None:
    """A random model with experts, of sizes that are packed. more: sizes that differ."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = COMMON | quantised_model.SIZES | quantised_model.EXPERTS | more
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).bfloat16()
    model.generation_config.eos_token_id = STOP_IDS
    model.save_pretrained(folder)
    tokenizer.train().save_pretrained(folder)


def make_vision(family: str, folder: Path, is_tied: bool) -> None:
    """A random vision-language model in bfloat16, whose language model has sizes that are packed."""
    torch.manual_seed(0)
    whole = VISION[family].config
    outer = whole.get("thinker_config", whole)
    text = outer["text_config"] | quantised_model.SIZES
    if "linear_key_head_dim" in text:
        text |= {"linear_key_head_dim": 32}
    if "kv_lora_rank" in text:  # whose heads have sizes of their own
        del text["head_dim"]
    if "num_experts" in text:
        text |= quantised_model.EXPERTS
    if "shared_expert_intermediate_size" in text:
        text |= {"shared_expert_intermediate_size": 128}
    sizes: dict[str, Any] = {"text_config": text, "vision_config": dict(outer["vision_config"])}
    if "out_hidden_size" in sizes["vision_config"]:
        sizes["vision_config"]["out_hidden_size"] = quantised_model.SIZES["hidden_size"]
    inside = outer | sizes
    if outer is not whole:
        inside["audio_config"] = inside["audio_config"] | {"output_dim": quantised_model.SIZES["hidden_size"]}
    config = whole | ({"thinker_config": inside} if outer is not whole else inside)
    if is_tied or "tie_word_embeddings" in config:
        config |= {"tie_word_embeddings": is_tied}
    spec = dataclasses.replace(VISION[family], config=config)
    model = vision.make(spec)
    randomise_vectors(model)
    if spec.published is None:
        vision.save(spec, model.bfloat16().eval(), folder)
    else:
        vision.save(spec, model.bfloat16().eval(), folder / REFERENCE)
        folder.mkdir(exist_ok=True)
        spec.published(folder, folder / REFERENCE)


def model_of(folder: Path, case: Case) -> Path:
    floats = folder / case.family
    if case.family in VISION:
        floats = folder / f"{case.family}-{case.is_tied}"
        if not floats.exists():
            make_vision(case.family, floats, case.is_tied)
        return floats
    if not floats.exists() and case.family == "qwen3_moe":
        make_experts(floats)
    elif not floats.exists():
        make(case.family, floats, torch.bfloat16, "300KB" if case.family == "qwen2" else "50GB")
    return tied(floats) if case.is_tied else floats


def serve(lab: Lab, model: Path, eager: bool, environment: dict[str, str]) -> EngineRun:
    config = json.loads((model / "config.json").read_text())
    config = config.get("thinker_config", config)
    size = config.get("text_config", config)["vocab_size"]
    sequences = [[(7 * i + length) % (size - 10) + 5 for i in range(length)] for length in SCORED]
    gen = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    steps = [
        {"name": "batch", "kind": "call", "prompts": lab.prompts(model), "gen": gen},
        {"name": "logits", "kind": "teacher_forced", "sequences": sequences},
        {"name": "tables", "kind": "tables"},
    ]
    environment = {"DLINFER_FALLBACK": "error", **environment}
    return lab.engine(model, steps, environment=environment, dtype="bfloat16", eager_mode=eager)


def check(lab: Lab, folder: Path, case: Case) -> None:
    model = model_of(folder, case)
    head = {"DLINFER_CPU_HEAD": case.head} if case.head else {}
    want = serve(lab, model, case.eager, head)
    got = serve(lab, model, case.eager, ASKED | head)
    packed: Any = got["tables"]
    assert want["tables"] == 0 < packed
    assert case.packed in (None, packed)
    assert got.tokens("batch") == want.tokens("batch")
    assert got["logits"] == want["logits"]  # their shapes, or what a step raised
    for i in range(len(SCORED)):
        np.testing.assert_array_equal(got.logits[f"logits/{i}"], want.logits[f"logits/{i}"])
    assert case.eager == (got["graphs"]["steps"] == 0)
    if not case.eager:
        assert {outcome for _, outcome, _ in got["graphs"]["phases"]} <= {"compiled", "loaded"}


@pytest.mark.parametrize("case", GATE, ids=str)
def test_the_same_bits_as_in_bfloat16(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case not in GATE], ids=str)
def test_the_others(lab: Lab, folder: Path, case: Case) -> None:
    check(lab, folder, case)


@pytest.mark.full
@pytest.mark.parametrize("eager", [True, False])
def test_adapters_on_packed_layers(lab: Lab, eager: bool) -> None:
    """Layers of a tiny model are narrower than 128 numbers, so most stay; those that are packed have adapters too."""
    with test_adapters.made(lab, "llama") as case:
        options = {"dtype": "bfloat16", "adapters": case.adapters, "eager_mode": eager}
        steps = [test_adapters.step(), {"name": "tables", "kind": "tables"}]
        want, got = (
            lab.engine(case.model, steps, environment={"DLINFER_FALLBACK": "error", **more}, **options)
            for more in ({}, ASKED)
        )
    assert (want["tables"], got["tables"]) == (0, 2)
    assert got.tokens("mixed") == want.tokens("mixed")
