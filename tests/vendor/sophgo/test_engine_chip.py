"""``chip="auto"``: which chip regions are compiled for where none is named, and that the report says it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dlinfer import settings
from dlinfer.errors import CompileOptionError
from dlinfer.vendor.sophgo.engine import chip as engine_chip
from dlinfer.vendor.sophgo.engine.options import SophgoOptions
from dlinfer.vendor.sophgo.runtime import chips
from tests.vendor.sophgo.regions import compiled


def found(monkeypatch, libsophon: Path | None, chip: str = "none") -> list[int]:
    """Let the machine have this chip, or none; gives the numbers of devices that were opened."""
    opened: list[int] = []

    def opener(number: int) -> SimpleNamespace:
        opened.append(number)
        return SimpleNamespace(chip=chip)

    monkeypatch.setattr(chips, "find", lambda: chips.Found(libsophon, (chip,), ""))
    monkeypatch.setattr(engine_chip, "open_device", opener)
    return opened


def test_auto_is_the_default_and_the_machines_own_chip(monkeypatch):
    opened = found(monkeypatch, Path("/opt"), "bm1688")
    options, why = engine_chip.settled(SophgoOptions.of({"device": 3, "cores": 2}))
    assert (options.chip, options.cores, opened) == ("bm1688", 2, [3])
    assert why == "chip bm1688, device 3 of this machine"


def test_without_a_chip_it_is_the_emulated_one(monkeypatch):
    opened = found(monkeypatch, None)
    options, why = engine_chip.settled(SophgoOptions())
    assert options.chip == "bm1684x" and "no Sophgo chip" in why
    with settings.override(sophgo_emulate="bm1688"):
        options, why = engine_chip.settled(SophgoOptions())
    assert options.chip == "bm1688" and "DLINFER_SOPHGO_EMULATE" in why
    assert engine_chip.settled(SophgoOptions.of({"chip": "bm1688"}))[0].chip == "bm1688"
    assert not opened


def test_a_chip_that_does_not_fit_is_refused(monkeypatch):
    found(monkeypatch, Path("/opt"), "chip 0x1690")
    with pytest.raises(CompileOptionError, match="device 0 of this machine is chip 0x1690"):
        engine_chip.settled(SophgoOptions())
    found(monkeypatch, None)
    with pytest.raises(CompileOptionError, match="1 to 1, the cores of bm1684x"):
        engine_chip.settled(SophgoOptions.of({"cores": 2}))


@pytest.mark.parametrize("chip", ["bm1684x", pytest.param("bm1688", marks=pytest.mark.full)])
def test_the_report_says_which(toolchain, chip):
    with settings.override(sophgo_emulate=chip):
        region = compiled(lambda x: (x @ x).relu(), torch.ones(4, 4))
        assert region.run(torch.ones(4, 4))[0].tolist() == [[4.0] * 4] * 4
    assert region.notes[0] == f"chip {chip}, emulated because of DLINFER_SOPHGO_EMULATE"
    assert f"bmodel F32 for {chip}" in region.notes[1]
