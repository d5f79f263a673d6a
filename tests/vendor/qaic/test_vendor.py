"""qaic as a vendor: found, never a default, the host's kernels, and a probe that says what there is."""

import subprocess
import sys

import pytest

from dlinfer.errors import VendorUnavailableError
from dlinfer.vendor import discovery
from dlinfer.vendor.qaic import VENDOR, sdk


def test_it_is_a_vendor_of_the_cpu_that_nobody_gets_by_default(plugins):
    assert discovery.get("qaic") is VENDOR
    assert discovery.activate_default("cpu") is discovery.get("cpu")
    assert VENDOR.priority < discovery.get("cpu").priority


def test_its_kernels_are_those_of_the_hosts_best_vendor(plugins):
    kernels = dict(discovery.kernels_of(VENDOR))
    assert kernels == dict(discovery.kernels_of(discovery.get("cpu")))
    assert kernels
    assert discovery.use("qaic") is VENDOR


def test_its_kernels_are_the_hosts_even_where_the_setting_names_it(plugins):
    from dlinfer import settings

    with settings.override(vendor="qaic"):
        assert discovery.activate_default("cpu") is VENDOR
        assert dict(discovery.kernels_of(VENDOR)) == dict(discovery.kernels_of(discovery.get("cpu")))


def test_the_probe_with_the_sdk(stand_in):
    assert VENDOR.probe() == discovery.probe(VENDOR)
    assert (VENDOR.probe().available, VENDOR.probe().reason) == (True, "Qualcomm Cloud AI SDK")


def test_the_probe_without_sdk_says_what_is_missing_and_what_runs(without_sdk):
    answer = VENDOR.probe()
    assert answer.available
    assert "the Python package qaic is not installed" in answer.reason
    assert answer.reason.endswith("only backend 'onnxruntime' can run")
    assert answer.next_step == sdk.ADVICE


def test_the_probe_without_sdk_and_onnxruntime_says_no(plugins, without_sdk, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert not VENDOR.probe().available
    with pytest.raises(
        VendorUnavailableError,
        match=r"onnxruntime, which could replace it, is not installed.*pip install 'dlinfer\[qaic\]'",
    ):
        discovery.use("qaic")


def test_importing_it_and_its_session_loads_no_sdk():
    code = (
        "import sys\nfrom dlinfer.vendor.qaic import Session, VENDOR\nVENDOR.probe()\n"
        "print(sorted({'qaic', 'qaicrt', 'onnxruntime', 'onnx', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True
    )
    assert done.stdout.strip() == "[]"


def test_there_is_nothing_else_by_a_wrong_name():
    import dlinfer.vendor.qaic

    with pytest.raises(AttributeError, match="no attribute 'Sesion'"):
        dlinfer.vendor.qaic.Sesion  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]
