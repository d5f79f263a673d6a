"""DLINFER_CPU_WEIGHTS=int8 and int4 for classes that LMDeploy cannot build quantised.

Oracle: the same model in floats, whose weights, and for int8 the inputs of its layers, are rounded to the same values.
Rounding an input may fall either way where it lies between two numbers, so only int4's tokens have to be the same.
"""

from typing import Any

import numpy as np
import pytest

from dlinfer.framework.lmdeploy_ext.conversion import floats
from examples.tiny_models.families import BRIEF, FAMILIES
from examples.tiny_models.vision_families import VISION
from tests.e2e.harness import EngineRun, Lab
from tests.e2e.test_vision import chats_of
from tests.e2e.vision_chats import as_openai

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1000)]

SCORED = (3, 20, 80)
NEW = 16
NEAR = {"int8": 0.02, "int4": 2e-4}
"""The largest error of logits, as a part of their norm."""

# Every class that is served and packed in place: one family each.
TEXT = (
    *"internlm2 phi3_longrope glm4 gemma gemma2_window gemma3_window deepseek_v2 internlm3 glm4_moe gpt_oss".split(),
    *"qwen3_next deepseek deepseek_v3 deepseek_v32 glm_moe_dsa glm4_moe_lite hy3 chatglm phimoe minicpm3".split(),
    "deepseek_v4",
)
IMAGES = (
    *"gemma3_vl llava llava_next llama4 qwen3_omni interns1 interns2_preview qwen3_vl qwen3_vl_moe".split(),
    *"qwen2_vl qwen2_5_vl internvl internvl_chat glm4v kimi_k25".split(),
)
INT8_ALONE = ("qwen2_moe", "qwen3_moe", "qwen3_5_moe")


def serve(lab: Lab, family: str, eager: bool, bits: str, packs: bool) -> EngineRun:
    model = lab.model(family)
    sequences = [[(7 * i + length) % 900 + 5 for i in range(length)] for length in SCORED]
    asked = [as_openai(chat) for chat in chats_of(family)] if family in VISION else lab.prompts(model)
    gen = {"max_new_tokens": NEW, "ignore_eos": True}
    steps = [
        {"name": "count", "kind": "packed"} if packs else {"name": "count", "kind": "rounded", "bits": bits},
        {"name": "batch", "kind": "call", "prompts": asked, "chat": family in VISION, "gen": gen},
        {"name": "logits", "kind": "teacher_forced", "sequences": sequences},
    ]
    environment = {"DLINFER_FALLBACK": "error", "DLINFER_CPU_HEAD": "kept"}
    environment |= {"DLINFER_CPU_WEIGHTS": bits} if packs else {}
    options = {"session_len": 2048} if family == "llava_next" else {}
    return lab.engine(model, steps, environment=environment, dtype="float32", eager_mode=eager, **options)


def check(lab: Lab, family: str, bits: str, eager: bool) -> None:
    got = serve(lab, family, eager, bits, packs=True)
    want = serve(lab, family, True, bits, packs=False)
    packed: Any = got["count"]
    assert packed == want["count"]
    assert packed > 0
    assert got["logits"] == want["logits"]  # their shapes
    errors = []
    for i in range(len(SCORED)):
        one, other = got.logits[f"logits/{i}"], want.logits[f"logits/{i}"]
        errors += list(np.linalg.norm(one - other, axis=-1) / np.linalg.norm(other, axis=-1))
    assert np.median(errors) < NEAR[bits], np.median(errors)
    if bits == "int4":
        assert got.tokens("batch") == want.tokens("batch")
        assert max(errors) < NEAR[bits]
    assert eager == (got["graphs"]["steps"] == 0)
    if not eager:
        assert {outcome for _, outcome, _ in got["graphs"]["phases"]} <= {"compiled", "loaded"}


@pytest.mark.parametrize(("family", "bits"), [("gemma2_window", "int4"), ("qwen3_moe", "int8")])
def test_weights_of_a_class_that_lmdeploy_does_not_quantise(lab: Lab, family: str, bits: str) -> None:
    check(lab, family, bits, eager=True)


def test_every_class_has_a_family_here() -> None:
    """Of those that LMDeploy builds quantised, ``test_weights_setting.py`` has some."""
    built = {name.removesuffix("ForCausalLM") for bits in floats.ADMITTED.values() for name in bits}
    classes = {one.hf_name: name for name, one in (FAMILIES | BRIEF | VISION).items()}
    assert {name for name in classes if name not in built | {"Qwen3_5", "Qwen3_5Moe"}} <= {
        (FAMILIES | BRIEF | VISION)[name].hf_name for name in (*TEXT, *IMAGES)
    }


@pytest.mark.full
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("family", [*TEXT, *IMAGES])
def test_eagerly(lab: Lab, family: str, bits: str) -> None:
    check(lab, family, bits, eager=True)


@pytest.mark.full
@pytest.mark.parametrize("family", INT8_ALONE)
def test_int8_of_experts_for_which_lmdeploy_has_int4_alone(lab: Lab, family: str) -> None:
    check(lab, family, "int8", eager=True)


@pytest.mark.full
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("family", ["gemma2_window", "deepseek_v2", "llama4", "qwen3_omni"])
def test_as_graphs(lab: Lab, family: str, bits: str) -> None:
    check(lab, family, bits, eager=False)
