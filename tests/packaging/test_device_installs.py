"""``DEVICE=ascend``, extras and requirements of devices: what they mean, and what they must not bring along."""

import importlib.util
import os
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.workers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEVICES = ("ascend", "maca", "camb")


@pytest.fixture
def hatch_version():
    spec = importlib.util.spec_from_file_location("hatch_version", ROOT / "hatch_version.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("device", "label"), [("", ""), ("cuda", ""), *((name, f"+{name}") for name in DEVICES)]
)
def test_a_device_is_a_label(device, label, hatch_version, monkeypatch):
    from dlinfer import __version__

    monkeypatch.setenv("DEVICE", device)
    assert hatch_version.version() == f"{__version__}{label}"
    assert (f"label {label}" in hatch_version.sentence()) is bool(label)


def test_the_builder_asks_for_it():
    """hatchling, as pip calls it."""
    command = [sys.executable, "-m", "hatchling", "version"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"DEVICE": "ascend"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("+ascend")


def test_every_device_has_an_extra_and_a_file():
    for name in DEVICES:
        assert name in PROJECT["optional-dependencies"]
        assert (ROOT / "requirements" / name / "full.txt").is_file()


@pytest.mark.parametrize("name", ["maca", "camb"])
def test_a_file_beside_the_makers_torch_lists_what_lmdeploy_imports(name):
    """They are installed beside dlinfer without its dependencies, so nothing else brings these packages."""
    lines = (ROOT / "requirements" / name / "full.txt").read_text().splitlines()
    listed = {str(Requirement(line)) for line in lines if line and not line.startswith("#")}
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["lmdeploy"]]
    assert listed == {str(one) for one in map(Requirement, wanted) if one.name != "torch"}


def test_no_other_extra_brings_a_package_that_breaks_torch():
    for name, wanted in PROJECT["optional-dependencies"].items():
        joined = " ".join(wanted)
        assert ("torch_npu" in joined) is (name == "ascend")
        if name != "ascend":
            assert "ascend" not in joined


def test_versions_of_ascend_are_those_of_the_schemas():
    from dlinfer.vendor.ascend.diagnosis import TESTED

    wanted = {f"torch=={TESTED}", f"torch_npu=={TESTED}"}
    assert wanted <= set(PROJECT["optional-dependencies"]["ascend"])
    assert wanted <= set((ROOT / "requirements/ascend/full.txt").read_text().splitlines())


def test_setup_py_takes_the_two_commands_that_it_knows():
    done = subprocess.run(
        [sys.executable, "setup.py", "bdist"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "usage" in done.stderr
