"""Fixtures of the op tests: each may activate vendors and cause fallbacks, and leaves none behind."""

from collections.abc import Callable, Iterator

import pytest

from dlinfer import settings
from dlinfer.ops.core import fallback
from dlinfer.vendor import Vendor, discovery


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Starts on vendor cpu with no fallback counted, which are errors unless a test allows them."""
    discovery.use("cpu")
    fallback.reset()
    with settings.override(fallback="error"):
        yield
    discovery.use("cpu")
    fallback.reset()


@pytest.fixture
def activate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Vendor], Vendor]:
    """``activate(vendor)`` makes a vendor that a test has built the active one of its device."""

    def install(vendor: Vendor) -> Vendor:
        monkeypatch.setitem(discovery._loaded, vendor.name, vendor)
        return discovery.use(vendor.name)

    return install
