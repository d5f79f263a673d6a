"""Skips tests of what torch 2.12 cannot do. LMDeploy 0.18's metadata asks for that release, so the rest has to pass."""

from typing import Any

import pytest
import torch

IS_2_12 = torch.__version__.startswith("2.12.")


def since_2_13(what: str) -> Any:
    """Return a mark that skips a test with torch 2.12. what: the reason, after "torch 2.12"."""
    return pytest.mark.skipif(IS_2_12, reason=f"torch 2.12 {what}")
