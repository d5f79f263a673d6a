"""MegEngine's tests run on the real library; without its toolchain they are left out and say so."""

from pathlib import Path

import numpy as np
import pytest

from dlinfer.toolchain import state
from dlinfer.vendor.megengine.toolchain import TOOLCHAIN


@pytest.fixture(scope="session", autouse=True)
def toolchain() -> None:
    found = state(TOOLCHAIN)
    if not found.installed:
        pytest.skip(f"the toolchain megengine: {found.reason}; `make toolchains` installs it")


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


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _file(factory, model: bytes) -> Path:
    path = factory.mktemp("megengine") / "model.mge"
    path.write_bytes(model)
    return path
