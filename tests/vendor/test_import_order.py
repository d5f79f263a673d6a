"""Whatever module of a vendor or of the graph is imported first, it imports what it needs."""

import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

import dlinfer

ROOT = Path(dlinfer.__file__).parent

# One process has torch and forks, so that each module is the first of dlinfer's and torch is imported once.
FORKS = """
import importlib, os, sys
import torch
for module in sys.argv[1:]:
    child = os.fork()
    if not child:
        for name in [name for name in sys.modules if name.partition(".")[0] == "dlinfer"]:
            del sys.modules[name]
        try:
            importlib.import_module(module)
        except BaseException as error:
            print(module, type(error).__name__, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def modules() -> list[str]:
    """Those that name dlinfer's torch ops, defined by ``dlinfer.ops``, of vendors whose SDK is installed."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        sdk = parts[2] if parts[1] == "vendor" else ""
        if re.search(r"torch\.ops\.dlinfer\b", path.read_text()) and _is_there(sdk):
            found.append(".".join(parts).removesuffix(".__init__"))
    return found


def _is_there(vendor: str) -> bool:
    return vendor not in ("openvino", "onnxruntime") or util.find_spec(vendor) is not None


@pytest.mark.full
def test_any_module_may_be_the_first():
    assert len(modules()) > 10
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *modules()], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
