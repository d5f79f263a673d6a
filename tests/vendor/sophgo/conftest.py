"""Tests of the vendor sophgo on the real runtime, with the chips emulated. They need Sophgo's toolchain."""

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dlinfer import cli, settings
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.runtime import device
from dlinfer.vendor.sophgo.runtime.device import Device, open_device
from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN
from tests.toolchains import need
from tests.vendor.sophgo import bmodels, llms

CHIPS = ("bm1684x", "bm1688")


@pytest.fixture(scope="session")
def toolchain() -> None:
    need(TOOLCHAIN)


@pytest.fixture(scope="session")
def bmodel(toolchain: None) -> Callable[[str], Path]:
    """Path of a bmodel by the name of its recipe, compiled at first use."""
    return bmodels.build


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a tiny model by its kind."""
    made = {}

    def folder(kind: str):
        if kind not in made:
            made[kind] = llms.write(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def bmodel_of(toolchain: None, model_folder, tmp_path_factory) -> Callable[..., Path]:
    """The file that the command writes, once for each model and chip."""
    made = {}

    def path(kind: str, chip: str, quantize: str = "F16"):
        key = (kind, chip, quantize)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("bmodel") / f"{kind}.bmodel"
            told = ["--engine", "sophgo", "--chip", chip, "--quantize", quantize, "--jobs", "2"]
            told += ["--seq-length", str(llms.CAPACITY), "--stages", ",".join(map(str, llms.STAGES))]
            assert cli.main(["compile", *told, str(model_folder(kind)), "-o", str(made[key])]) == 0
        return made[key]

    return path


@pytest.fixture(scope="session")
def open_chips(toolchain: None) -> Iterator[dict[str, Device]]:
    """One device of each chip, open for the whole session, so that tests need not start workers."""
    devices = {}
    for chip in CHIPS:
        with settings.override(sophgo_emulate=chip):
            devices[chip] = open_device(200)
    yield devices


@pytest.fixture
def fresh(toolchain, monkeypatch) -> None:
    """Workers of this test's own, which it may end."""
    monkeypatch.setattr(device, "_workers", weakref.WeakValueDictionary())
    monkeypatch.setattr(device, "_devices", weakref.WeakValueDictionary())
    monkeypatch.setattr(device, "_latest", {})


@pytest.fixture(scope="session")
def opened(bmodel, open_chips) -> Callable[[str], sail.EngineLLM]:
    """An engine on device 0 by the name of its recipe, opened once; for tests that leave it and its worker sound.

    One of addr_mode basic is not kept: beside it no larger bmodel can be loaded.
    """

    def made(name: str) -> sail.EngineLLM:
        return sail.EngineLLM(str(bmodel(name)), [0])

    kept = cache(made)
    return lambda name: (made if name == "basic" else kept)(name)


@pytest.fixture(params=CHIPS)
def engine(request: pytest.FixtureRequest, opened) -> sail.EngineLLM:
    """Network ``mlp`` with two stages and, on bm1684x, ``head``; on device 0."""
    return opened(request.param)


@pytest.fixture
def llm(opened) -> sail.EngineLLM:
    """The engine of bm1684x with both networks."""
    return opened("bm1684x")


def numbers(rows: int, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """float32 inputs x and bias [1, rows, 16]."""
    random = np.random.RandomState(seed)
    shape = (1, rows, bmodels.WIDTH)
    return random.randn(*shape).astype(np.float32), random.randn(*shape).astype(np.float32)


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """The relative L2 distance."""
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))
