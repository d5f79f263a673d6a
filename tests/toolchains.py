"""Tests that need a toolchain: skipped where it is not installed, failed where it has to be."""

import os

import pytest

from dlinfer.toolchain import Toolchain, state

REQUIRED = "DLINFER_TEST_TOOLCHAINS"
"""The gate sets this to ``required`` once it has installed the toolchains: then a test that finds none fails."""


def need(toolchain: Toolchain) -> None:
    found = state(toolchain)
    if found.installed:
        return
    reason = f"needs the toolchain {toolchain.name}, and {found.reason}: make toolchains"
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
