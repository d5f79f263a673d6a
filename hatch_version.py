"""The version of what is built: dlinfer's own, and for ``DEVICE=ascend`` with that label: 0.4.0+ascend.

Earlier dlinfer chose its vendor when it was built, by this variable. Now vendors are found when they are used, and what
is built is the same for all: the label says for which device somebody built it, and nothing more.
"""

import os
import re
from pathlib import Path

DEVICES = ("ascend", "maca", "camb")
"""Values of DEVICE that mean a vendor of dlinfer's; the variable may be somebody else's, so others mean nothing."""


def device() -> str:
    """The device that DEVICE names; empty where it names none of ours."""
    named = os.environ.get("DEVICE", "")
    return named if named in DEVICES else ""


def version() -> str:
    """The version, for ``[tool.hatch.version]`` of pyproject.toml."""
    text = (Path(__file__).parent / "dlinfer" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None, "dlinfer/__init__.py has the version"
    return found[1] + (f"+{device()}" if device() else "")


def sentence() -> str:
    """What DEVICE means to somebody who builds with it; empty where it names none of ours."""
    if not device():
        return ""
    return (
        f"DEVICE={device()}: the version gets the label +{device()}, and that is all: dlinfer finds its vendors when "
        f"they are used. pip install '.[{device()}]' adds what PyPI has for this one (docs/start/install.md)"
    )
