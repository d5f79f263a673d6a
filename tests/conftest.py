"""What all tests share: random numbers that are a test's own, patience with a slow machine, installed plugins."""

import gc
import importlib
import logging
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy
import pytest
import torch

from dlinfer.vendor import discovery
from tests.caches import kept_folder
from tests.plugins.builder import write_plugin

if TYPE_CHECKING:
    from tests.e2e.harness import Lab

# A machine that does much else besides is no fault of a test. All else stays as Hypothesis has it here or in a CI.
hypothesis.settings.register_profile(
    "patient",
    hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]),
)
hypothesis.settings.load_profile("patient")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What ``--dist loadfile`` takes."""
    from tests.scheduling import ByFile  # imports xdist, which has this hook called

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def seed(name: str) -> None:
    """Let all that is drawn from now on depend on a name alone."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    numpy.random.seed(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed looks for devices, and takes 0.3 ms


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare all tests what takes a large part of their time and tells them nothing.

    What all modules hold stays, and is not looked through again and again. Dynamo measures the guards of each graph,
    for which it empties the CPU's caches (30 ms). torch writes a record of all that it compiles as soon as its logger
    has a handler, and pytest gives one to each logger that does not propagate (10 ms).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    if guards := sys.modules.get("torch._dynamo.guards"):
        setattr(guards, "profile_guard_manager", lambda *_: 0.0)  # noqa: B010 - pyright knows no such module
    logging.getLogger("torch.__trace").propagate = True


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a module draws when it is imported is its own, too."""
    seed(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """A fixture draws the same whichever test asks for it first."""
    seed(f"{request.node.nodeid} {fixturedef.argname}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test draws the same alone, in any order and beside any others: what it compares is no matter of luck."""
    seed(item.nodeid)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test starts on the vendor cpu, whatever the tests before it made active or had settings choose.

    ``make test-seam`` runs on the sources, where no vendor is installed.
    """
    active = discovery.active("cpu")
    if (active is None or active.name != "cpu") and "cpu" in discovery.names():
        discovery.use("cpu")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``plugins(name, source)`` installs a vendor; discovery starts empty and drives no dispatcher."""
    states = {"_loaded": {}, "_origins": {}, "_active": {}, "_devices": {}, "kv_orders": {}, "_listeners": []}
    for state, empty in states.items():
        monkeypatch.setattr(discovery, state, empty)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(name: str, source: str, distribution: str = "") -> None:
        write_plugin(tmp_path, name, source, distribution)
        importlib.invalidate_caches()

    yield install
    for name in set(sys.modules) - before:
        if name.endswith("_plugin"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def lab(pytestconfig: pytest.Config) -> Iterator["Lab"]:
    """Tiny models, transformers' answers and LMDeploy's; its processes wait for the next test that asks them."""
    from tests.e2e.harness import Lab

    made = Lab(kept_folder(pytestconfig))
    yield made
    made.close()
