"""tp=2 on the CPU: LMDeploy's own processes give the tokens of one rank, and of transformers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.tiny_models.build import build, reference_folder
from tests.e2e import packed_experts_model, packed_model, quantised_model
from tests.e2e import test_adapters as adapter_cases
from tests.e2e.cell_checks import compare_tokens, first_difference
from tests.e2e.harness import NEW_TOKENS, PROMPT_LENGTHS, Lab
from tests.e2e.matrix import BRIEF, POSITION_SEED, POSITION_SEEDS
from tests.e2e.test_bf12_weights import make_experts
from tests.e2e.test_quantise_command import make
from tests.e2e.test_quantised import LAST_DIGITS, STEP
from tests.e2e.test_weights_setting import write

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1200)]

# Of each class in ``checks.model.tensor_parallel.COMPARED``.
FAMILIES = (
    *("llama", "qwen2", "qwen3", "internlm2", "mixtral", "qwen2_moe", "qwen3_moe"),
    *("mistral_window", "gemma", "gemma2_window", "internlm3"),
)
QUICK = ("llama", "graph")


def _cells():
    for family in FAMILIES:
        for mode in ("eager", "graph"):
            yield pytest.param(family, mode, marks=() if (family, mode) == QUICK else pytest.mark.full)


def _many(lab: Lab, model: Any) -> dict[str, Any]:
    prompts = lab.prompts(model, PROMPT_LENGTHS)
    return {"prompts": prompts, "gen": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}}


@pytest.mark.parametrize(("family", "mode"), _cells())
def test_two_ranks_give_the_tokens_of_one(family: str, mode: str, lab: Lab) -> None:
    """Which are transformers', as those of one rank are (test_matrix.py). Prompts join running ones, in pieces."""
    seed = POSITION_SEEDS.get(family, POSITION_SEED) if family in BRIEF else 0
    model = lab.model(family, seed)
    many = _many(lab, model)
    steps = [
        {"name": "batch", "kind": "call", **many},
        {"name": "staggered", "kind": "staggered", "after": 5, **many},
        {"name": "ranks", "kind": "ranks"},
    ]
    hf = lab.reference(model, prompts=many["prompts"], max_new_tokens=NEW_TOKENS, dtype="float32")
    options = {"tp": 2, "eager_mode": mode == "eager", "dtype": "float32", "max_prefill_token_num": 32}
    run = lab.engine(model, steps, environment={"DLINFER_FALLBACK": "error"}, **options)
    for step in ("batch", "staggered"):
        assert compare_tokens(step, run, hf, "float32") == []
    assert run["ranks"] == 2


MODES = ["eager", "graph"]


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama_awq_groups", "llama"])
def test_four_ranks(family: str, mode: str, lab: Lab) -> None:
    """Of four heads of keys and values each rank has one; of two, two ranks have the same one."""
    _compare(lab, reference_folder(lab.model(family)), 4, mode)


def _compare(
    lab: Lab, model: Path, ranks: int, mode: str, weights: str = "", is_rounded: bool = False
) -> None:
    """Assert that the tokens of some ranks are those of one.

    weights: the value of DLINFER_CPU_WEIGHTS. is_rounded: whether activations are rounded to 8 bits, where a last digit
    of a sum may decide between two numbers. Then rows of logits that are not equal to the last digits are within a
    step, and tokens may part where the best two logits are.
    """
    many = _many(lab, model)
    many["gen"]["logprobs"] = 2
    steps = [
        {"name": "batch", "kind": "call", **many},
        {
            "name": "logits",
            "kind": "teacher_forced",
            "sequences": [list(range(5, 5 + n)) for n in (3, 20, 80)],
        },
    ]
    options = {"eager_mode": mode == "eager", "dtype": "float32", "logprobs_mode": "raw_logits"}
    starts = [(model, steps, {"tp": tp, **options}) for tp in (1, ranks)]
    environment = {"DLINFER_FALLBACK": "error"} | ({"DLINFER_CPU_WEIGHTS": weights} if weights else {})
    one, several = lab.engines(starts, environment=environment)
    assert one["logits"] == several["logits"]  # their shapes
    apart = np.concatenate([np.abs(several.logits[key] - one.logits[key]).max(-1) for key in one.logits])
    assert np.quantile(apart, 0.8 if is_rounded else 1) < LAST_DIGITS
    assert apart.max() < STEP
    for alone, together in zip(one["batch"], several["batch"], strict=True):
        at = first_difference(together["token_ids"], np.asarray(alone["token_ids"]))
        if at is not None:
            second, best = sorted(logit for _, logit in alone["logprobs"][at])[-2:]
            assert is_rounded and best - second < STEP, (at, best, second)


# Families that the setting packs while they load.
AS_THEY_LOAD = {
    "int8": ("llama", "qwen2", "qwen3", "mistral_window"),
    "int4": ("llama", "qwen2", "qwen3", "mistral_window", "mixtral", "experts"),
}


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("weights", "family"), [(bits, family) for bits, families in AS_THEY_LOAD.items() for family in families]
)
def test_weights_packed_as_they_load(weights: str, family: str, mode: str, lab: Lab, folder: Path) -> None:
    model = _experts(folder) if family == "experts" else lab.model(family)
    _compare(lab, model, 2, mode, weights, is_rounded=weights in ROUNDED)


KEYS = {"num_key_value_heads": 4, "hidden_size": 256}
EXPERTS = {"moe_intermediate_size": 256}


def _experts(folder: Path) -> Path:
    """A Qwen3-MoE of which two ranks have whole groups of int4, and halves of a size that bf12 packs."""
    model = folder / "experts"
    if not model.exists():
        make_experts(model, **EXPERTS)
    return model


CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "llama-awq": partial(build, "llama_awq_groups"),
    **{
        f"{family}-{method}": partial(quantised_model.build, family, method, **KEYS)
        for family in ("llama", "qwen2", "qwen3")
        for method in ("int8", "float8", "blocked", "static")
    },
    "qwen2-ue8m0": partial(quantised_model.build, "qwen2", "ue8m0", **KEYS),
    **{
        f"qwen3_moe-{method}": partial(quantised_model.build, "qwen3_moe", method, **KEYS, **EXPERTS)
        for method in ("blocked", "static")
    },
    "mistral-blocked": partial(quantised_model.build, "mistral", "blocked", **KEYS),
    "mixtral-blocked": partial(quantised_model.build, "mixtral", "blocked", **KEYS, head_dim=64),
    "llama-blocked-compressed": partial(
        quantised_model.build, "llama", "blocked", is_compressed=True, **KEYS
    ),
    "qwen2-float8-compressed": partial(quantised_model.build, "qwen2", "float8", is_compressed=True, **KEYS),
    "qwen2-gptq": partial(packed_model.build, "qwen2", "gptq", intermediate_size=320),
    "llama-w4a16_channel": partial(
        packed_model.build, "llama", "w4a16_channel", hidden_size=128, head_dim=32
    ),
    "mixtral-awq": partial(packed_experts_model.build, "mixtral", "awq"),
    "qwen3_moe-awq": partial(packed_experts_model.build, "qwen3_moe", "awq"),
    "qwen3_moe-gptq": partial(packed_experts_model.build, "qwen3_moe", "gptq"),
    "qwen3_moe-experts": partial(packed_experts_model.build, "qwen3_moe", "experts"),
    "qwen2_moe-awq": partial(
        packed_experts_model.build, "qwen2_moe", "awq", shared_expert_intermediate_size=128
    ),
}


ROUNDED = ("int8", "float8", "blocked", "ue8m0", "static")
"""Formats with activations in 8 bits."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor-parallel")


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantised_checkpoints(name: str, mode: str, lab: Lab, folder: Path) -> None:
    """Each rank has whole groups and blocks, so it rounds activations as one rank does."""
    if not (folder / name).exists():
        CHECKPOINTS[name](folder / name)
    _compare(lab, folder / name, 2, mode, is_rounded=any(form in name for form in ROUNDED))


# Families that nothing converts or packs, so that a test has to write their folders. internlm3 has biases everywhere.
WRITTEN = {"int4": ("internlm2", "internlm3", "gemma", "gemma2_window"), "int8": ("internlm2", "internlm3")}


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("bits", "family"), [(bits, family) for bits, families in WRITTEN.items() for family in families]
)
def test_further_quantised_checkpoints(bits: str, family: str, mode: str, lab: Lab, folder: Path) -> None:
    model = folder / f"{family}-{bits}"
    if not model.exists():
        write(lab.model(family, POSITION_SEEDS.get(family, 0)), model, bits)
    _compare(lab, model, 2, mode, is_rounded=bits in ROUNDED)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "packed"), [("llama", 9), ("qwen3_moe", 11)])
def test_bf12(family: str, packed: int, mode: str, lab: Lab, folder: Path) -> None:
    """Tokens are those of two ranks with plain weights: in 16 bits the ranks' sums round otherwise than one rank's."""
    model = _experts(folder) if family == "qwen3_moe" else folder / "bfloat16"
    if not model.exists():
        make(family, model, torch.bfloat16)
    steps = [{"name": "batch", "kind": "call", **_many(lab, model)}]
    options = {"tp": 2, "eager_mode": mode == "eager", "dtype": "bfloat16"}
    plain = lab.engine(model, steps, **options)
    run = lab.engine(model, steps, environment={"DLINFER_CPU_WEIGHTS": "bf12"}, **options)
    assert run.tokens("batch") == plain.tokens("batch")
    assert run.log.count(f"packed {packed} weights") == 2  # on each rank


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("family", "ranks"), [("llama", 2), ("llama", 4), ("qwen2", 2), ("gemma", 2), ("qwen3_moe", 2)]
)
def test_adapters(family: str, ranks: int, mode: str, lab: Lab) -> None:
    """Two adapters and the base model in one batch say what PEFT says with each alone (test_adapters.py)."""
    with adapter_cases.made(lab, family) as case:
        options: dict[str, Any] = {"tp": ranks, "eager_mode": mode == "eager", "dtype": "float32"}
        run = lab.engine(case.model, [adapter_cases.step()], adapters=case.adapters, **options)
        adapter_cases.check(run, case)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_adapters_on_4_bits(mode: str, lab: Lab) -> None:
    """Two ranks say what one says with the same weights."""
    with adapter_cases.made(lab, "llama") as case:
        options = {"eager_mode": mode == "eager", "dtype": "float32", "adapters": case.adapters}
        starts = [(case.model, [adapter_cases.step()], {"tp": tp, **options}) for tp in (1, 2)]
        one, two = lab.engines(starts, environment={"DLINFER_CPU_WEIGHTS": "int4"})
    assert two.tokens("mixed") == one.tokens("mixed") != adapter_cases.expected(case)


@pytest.mark.full
def test_a_killed_rank(lab: Lab) -> None:
    """Ends the other one, and every request, with an error."""
    model = lab.model("llama")
    many = {"prompts": lab.prompts(model), "gen": {"max_new_tokens": 400, "ignore_eos": True}}
    steps = [{"name": "killed", "kind": "killed_rank", **many}]
    run = lab.engine(model, steps, tp=2, eager_mode=True, dtype="float32")
    assert run["killed"]["seconds"] < 10
    assert run["killed"]["alive"] == 0
    assert all(reason == "error" for reason in run["killed"]["reasons"])
    assert "rank 1 of 2 ended: it was killed by SIGKILL" in run.log
