"""MegEngine's tests run on the real library; without its toolchain they are left out and say so."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dlinfer.toolchain import find
from dlinfer.vendor.megengine.lite import LiteLogLevel, get_log_level, set_log_level
from dlinfer.vendor.megengine.toolchain import TOOLCHAIN
from tests.toolchains import need
from tests.vendor.megengine.observing import Log


@pytest.fixture(scope="session", autouse=True)
def toolchain() -> None:
    need(TOOLCHAIN)


@pytest.fixture(scope="session")
def layer(tmp_path_factory) -> Path:
    """The file of ``models.layer``."""
    from tests.vendor.megengine import models

    return _file(tmp_path_factory, models.layer())


@pytest.fixture(scope="session")
def held(tmp_path_factory) -> Path:
    """The file of ``models.held``."""
    from tests.vendor.megengine import models

    return _file(tmp_path_factory, models.held())


@pytest.fixture(scope="session")
def heavy(tmp_path_factory) -> Path:
    """The file of ``models.heavy``."""
    from tests.vendor.megengine import models

    return _file(tmp_path_factory, models.heavy())


@pytest.fixture(scope="session")
def convolution(tmp_path_factory) -> Path:
    """The file of ``models.convolution``."""
    from tests.vendor.megengine import models

    return _file(tmp_path_factory, models.convolution())


@pytest.fixture(scope="session")
def constant_convolution(tmp_path_factory) -> Path:
    """A convolution of [1, 64, 16, 16] by weights that the model holds."""
    path = tmp_path_factory.mktemp("megengine") / "constant.mge"
    script = Path(__file__).parent / "raw" / "constant_convolution.py"
    command = [find(TOOLCHAIN).python, "-I", script, path]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    return path


@pytest.fixture
def log(capfd) -> Iterator[Log]:
    """What the library prints at level DEBUG."""
    before = get_log_level()
    set_log_level(LiteLogLevel.DEBUG)
    yield lambda: capfd.readouterr().err
    set_log_level(before)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _file(factory, model: bytes) -> Path:
    path = factory.mktemp("megengine") / "model.mge"
    path.write_bytes(model)
    return path
