"""The vendor onnxruntime: cheap to ask, honest about what is missing, an engine and no kernels of its own."""

import subprocess
import sys
from importlib import util

import pytest

from dlinfer.errors import EngineUnavailableError
from dlinfer.graph.engine import find_engine
from dlinfer.vendor import discovery
from dlinfer.vendor.onnxruntime import VENDOR


@pytest.fixture
def without(monkeypatch):
    """``without(name)``: as if a package were not installed."""
    find = util.find_spec

    def hide(*hidden: str) -> None:
        monkeypatch.setattr(
            util, "find_spec", lambda name, *rest: None if name in hidden else find(name, *rest)
        )

    return hide


def test_the_probe_says_yes_where_everything_is_there():
    assert VENDOR.probe().available


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        (("onnxruntime",), "onnxruntime is not installed"),
        (("onnx", "onnxscript"), "onnx, onnxscript are not installed"),
    ],
)
def test_the_probe_names_what_is_missing_and_how_to_get_it(without, hidden, reason):
    without(*hidden)
    probe = VENDOR.probe()
    assert (probe.available, probe.reason) == (False, reason)
    assert probe.next_step == 'pip install "dlinfer[onnxruntime]"'
    with pytest.raises(EngineUnavailableError, match=reason):
        find_engine("onnxruntime", "cpu")


def test_asking_imports_nothing():
    code = (
        "import sys\nfrom dlinfer.vendor.onnxruntime import VENDOR\nVENDOR.probe()\n"
        "print(sorted({'onnxruntime', 'onnx', 'onnxscript', 'onnx_ir'} & set(sys.modules)))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True
    )
    assert child.stdout.strip() == "[]"


def test_the_engine_is_found_by_name():
    assert discovery.get("onnxruntime") is VENDOR
    assert find_engine("onnxruntime", "cpu").name == "onnxruntime"


def test_its_kernels_are_those_of_the_cpu_vendor_which_stays_the_default():
    assert discovery.kernels_of(VENDOR) == discovery.kernels_of(discovery.get("cpu"))
    assert discovery.default("cpu") is discovery.get("cpu")
