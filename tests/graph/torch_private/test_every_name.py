"""No private name of torch is reached that no test of the seam uses."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from dlinfer.graph import torch_private as seam

MODULES = sorted(found.name for found in pkgutil.iter_modules(seam.__path__))
# torch's own classes that annotations need.
TYPES = {"FakeTensor", "OpOverload", "ShapeEnv"}


def names_of(module_name: str) -> set[str]:
    """What a module of the seam offers: its own functions and classes, and what it re-exports."""
    module = importlib.import_module(f"{seam.__name__}.{module_name}")
    own = {
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    }
    return {name for name in own | set(getattr(module, "__all__", ())) if not name.startswith("_")} - TYPES


@pytest.mark.parametrize("module_name", MODULES)
def test_every_name_of_the_seam_is_used_in_its_tests(module_name):
    sources = [path.read_text() for path in Path(__file__).parent.glob("*.py")]
    assert [
        name
        for name in sorted(names_of(module_name))
        if not any(re.search(rf"\b{name}\b", s) for s in sources)
    ] == []
