"""LMDeploy on vendors' simulated devices; ``run.py`` is the whole matrix, of which the gate has a cell a device."""

from dataclasses import replace

import pytest

from tests.e2e.devices import cells, run
from tests.e2e.devices.table import DEVICES
from tests.e2e.harness import Lab

GATE = {"ascend": "qwen3_moe", "maca": "qwen2", "camb": "qwen3_moe"}
"""Triton's interpreter takes a minute for maca's experts."""


def in_the_gate(cell: cells.DeviceCell) -> bool:
    return (cell.family, cell.mode, cell.config) == (GATE[cell.device.device_type], "eager", "chunked")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", list(filter(in_the_gate, cells.cells())), ids=lambda cell: cell.name)
def test_a_device_gives_the_tokens_of_transformers(cell: cells.DeviceCell, lab: Lab) -> None:
    if reason := cell.device.missing():
        pytest.skip(reason)
    assert cells.check(cell, *cells.ask(lab, cell)) == []


class Run(dict):
    """An engine's answers, as ``check`` reads them."""


def answers(**placed: object) -> Run:
    there = {"devices": ["npu"], "block_size": 128, "references": {}} | placed
    return Run({step: [] for step in cells.STEPS} | {"placed": there})


@pytest.mark.parametrize(
    ("placed", "said"),
    [
        ({"devices": ["cpu", "npu"]}, "caches and weights lie on"),
        ({"references": {"linear": "no kernel"}}, "linear was answered by its reference"),
    ],
)
def test_what_is_not_on_the_device_is_a_failure(placed: dict, said: str) -> None:
    cell = cells.DeviceCell(DEVICES["ascend"], "llama", "eager", "base")
    assert cells.check(cell, answers(), {}) == []  # pyright: ignore[reportArgumentType]
    (failure,) = cells.check(cell, answers(**placed), {})  # pyright: ignore[reportArgumentType]
    assert said in failure


def test_the_table_says_what_was_found() -> None:
    asked = cells.cells(["llama", "qwen2"])
    entries: dict[str, dict] = {cell.name: {"failures": []} for cell in asked}
    broken = next(cell for cell in asked if (cell.family, cell.mode) == ("qwen2", "eager"))
    entries[broken.name]["failures"] = ["a token | differs\nmore"]
    text = run.document(entries)
    others = " equal |" * (len(DEVICES) - 1) * 2
    assert f"| llama | equal | equal |{others}" in text
    assert f"| qwen2 | equal | a token / differs |{others}" in text
    for device in DEVICES.values():
        assert f"{device.device_type} in {device.dtype}" in text
    assert "mixtral" not in text


def test_the_document_tells_what_is_on_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all ops that have one reason, of each device."""
    device = replace(
        DEVICES["camb"],
        on_references={
            ("llama", "linear"): "one",
            ("llama", "rms_norm"): "one",
            ("qwen2", "linear"): "other",
        },
    )
    monkeypatch.setattr(run, "DOCUMENTED", {"camb": device})
    text = run.document({})
    assert "- camb, llama: `linear`, `rms_norm`, since one.\n- camb, qwen2: `linear`, since other.\n" in text
    monkeypatch.setattr(run, "DOCUMENTED", {"camb": replace(device, on_references={})})
    assert "No op runs as its reference" in run.document({})


def test_the_document_has_every_family_and_device() -> None:
    """It is written by ``make device-models``; a device or a family that was added since is missing there."""
    text = run.DOCUMENT.read_text()
    for device in run.DOCUMENTED:
        assert f"{device}, default" in text
    for family in run.ASKED:
        assert f"\n| {family} | " in text
