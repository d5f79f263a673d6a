"""Conformance makes vendors active; each test leaves the cpu as it was."""

from collections.abc import Iterator

import pytest

from dlinfer.ops.core import fallback
from dlinfer.vendor import discovery


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    discovery.use("cpu")
    fallback.reset()
    yield
    discovery.use("cpu")
    fallback.reset()
