"""A cell of the matrix on a simulated device: one engine start, what it is asked and what has to hold."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from examples.tiny_models.families import BRIEF, FAMILIES, SIZED
from tests.e2e.cell_checks import compare_tokens
from tests.e2e.devices.table import DEVICES, SimulatedDevice
from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab
from tests.e2e.matrix import MODES, POSITION_SEED, POSITION_SEEDS

PROMPT_LENGTHS = (1, 2, 9, 80, 140)
"""The last fills a block of 128 slots and begins another."""
SEEDS = {
    "llama": 597,
    "qwen2": 7,
    "qwen3": 15,
    "internlm2": 12,
    "mixtral": 80,
    "qwen2_moe": 134,
    "qwen3_moe": 587,
    "deepseek_v2_latent": 73,
}
"""Whose greedy tokens in float16 are those in float32, by transformers' own arithmetic: of most random models some pair
of scores, or of experts, is so close that 16 bits decide. ``seeds.py`` prints by how much they do not, and looks for
better ones: of families with experts these have the largest margins of the first 200 seeds, qwen3_moe's of 600."""
STEPS = ("batch", "staggered", "one by one")
CONFIGS: dict[str, dict[str, Any]] = {"base": {}, "chunked": {"max_prefill_token_num": 32}}
"""Of PytorchEngineConfig. With prompts in pieces the later ones attend to pages."""


@dataclass(frozen=True)
class DeviceCell:
    device: SimulatedDevice
    family: str
    mode: str
    config: str

    @property
    def seed(self) -> int:
        other = POSITION_SEEDS.get(self.family, POSITION_SEED) if self.family in BRIEF else 0
        return SEEDS.get(self.family, other)

    @property
    def name(self) -> str:
        return f"{self.device.device_type}-{self.family}-{self.device.dtype}-{self.config}-{self.mode}"


def cells(families: Iterable[str] = (*FAMILIES, *SIZED)) -> list[DeviceCell]:
    """Each family on each device in each mode, alone and with prompts in pieces, without what a device refuses."""
    return [
        DeviceCell(device, family, mode, config)
        for device in DEVICES.values()
        for family in families
        if family not in device.refused
        for mode in MODES
        for config in CONFIGS
    ]


def ask(lab: Lab, cell: DeviceCell, tp: int = 1) -> tuple[EngineRun, dict[str, np.ndarray]]:
    """(LMDeploy's run on so many of the device, transformers' answer with the same weights on the CPU, in float32).

    What falls back is told; on several devices, whose processes tell nothing, it is refused.
    """
    model = lab.model(cell.family, cell.seed, cell.device.dtype)
    prompts = lab.prompts(model, PROMPT_LENGTHS)
    many = {"prompts": prompts, "gen": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}}
    steps = [
        {"name": "batch", "kind": "call", **many},
        {"name": "staggered", "kind": "staggered", "after": 5, **many},
        {"name": "one by one", "kind": "one_by_one", **many},
        {"name": "placed", "kind": "placed"} if tp == 1 else {"name": "ranks", "kind": "ranks"},
    ]
    hf = lab.reference(model, prompts=prompts, max_new_tokens=NEW_TOKENS, dtype="float32")
    there = cell.device.environment(lab.cache / "devices" / cell.device.device_type)
    run = lab.engine(
        model,
        steps,
        environment=there | {"DLINFER_FALLBACK": "allow" if tp == 1 else "error"},
        tp=tp,
        device_type=cell.device.device_type,
        dtype=cell.device.dtype,
        eager_mode=cell.mode == "eager",
        **CONFIGS[cell.config],
    )
    return run, hf


def check_tokens(run: EngineRun, hf: dict[str, np.ndarray]) -> list[str]:
    """Where tokens are not those of transformers."""
    return [
        text for step in STEPS for text in compare_tokens(step, run, hf, "float32")
    ]  # no ties are let pass


def check(cell: DeviceCell, run: EngineRun, hf: dict[str, np.ndarray]) -> list[str]:
    """The failures as text, empty when all is well."""
    failures = check_tokens(run, hf)
    placed = run["placed"]
    if placed["devices"] != [cell.device.torch_device]:
        failures.append(f"caches and weights lie on {placed['devices']}")
    known = {op for family, op in cell.device.on_references if family == cell.family}
    for op, reason in placed["references"].items():
        if op not in known:
            failures.append(f"{op} was answered by its reference: {reason}")
    return failures
