"""What doctor says of machines on which a device's packages are missing or do not fit, each with the next step."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlinfer.cli import autoload, doctor
from dlinfer.vendor import discovery
from dlinfer.vendor.ascend import diagnosis, sdk
from tests.plugins.builder import write_plugin

NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"
NO_DRIVER = "libascend_hal.so: cannot open shared object file: No such file or directory"
NO_NNAL = "libatb.so: cannot open shared object file: No such file or directory"


def fake_torch_npu(folder: Path, source: str, version: str = diagnosis.TESTED) -> None:
    """What pip would leave of a torch_npu whose import runs ``source``; torch loads it when it is imported."""
    (folder / "torch_npu").mkdir(parents=True)
    (folder / "torch_npu" / "__init__.py").write_text(source)
    info = folder / f"torch_npu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")


def run_doctor(folder: Path, **variables: str) -> dict:
    """``dlinfer doctor --json`` in a process that sees ``folder`` too."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    given = {key: value for key, value in os.environ.items() if key not in diagnosis.HOME_VARIABLES}
    command = [sys.executable, "-m", "dlinfer", "doctor", "--json"]
    done = subprocess.run(
        command,
        env=given | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


def row(report: dict, name: str = "ascend") -> dict:
    return next(vendor for vendor in report["vendors"] if vendor["name"] == name)


@pytest.mark.slow
def test_torch_s_autoload_fails_as_cann_is_missing(tmp_path):
    """Then ``import torch`` fails, and doctor with it, unless it looks in another process."""
    fake_torch_npu(tmp_path, f"raise ImportError({NO_CANN!r})", torch.__version__.split("+")[0])
    report = run_doctor(tmp_path)
    (problem,) = report["problems"]
    assert "import torch fails" in problem and "torch_npu" in problem and NO_CANN in problem
    assert "Next step:" in problem and not report["healthy"]
    assert "CANN's environment is not set" in row(report)["reason"]
    assert "set_env.sh" in row(report)["next_step"]
    assert row(report, "cpu")["state"] == "PASS"


@pytest.mark.slow
def test_another_command_says_what_torch_says(tmp_path):
    fake_torch_npu(tmp_path, f"raise ImportError({NO_CANN!r})", torch.__version__.split("+")[0])
    done = subprocess.run(
        [sys.executable, "-m", "dlinfer", "conformance", "cpu"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "RuntimeError: Failed to load the backend extension: torch_npu" in done.stderr
    assert autoload.reason(RuntimeError("another")) is None


@pytest.mark.slow
def test_another_version_of_torch_npu(tmp_path):
    """It is not loaded, since its binaries would not fit."""
    fake_torch_npu(tmp_path, "raise SystemExit('loaded')", version="2.9.0")
    report = run_doctor(tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert row(report)["reason"].startswith("torch_npu 2.9.0 does not fit torch ")
    assert f"torch_npu=={diagnosis.TESTED}" in row(report)["next_step"]


@pytest.mark.slow
def test_the_other_project_in_the_same_folder(tmp_path):
    info = tmp_path / "dlinfer_ascend-0.2.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dlinfer-ascend\nVersion: 0.2.7\n")
    report = run_doctor(tmp_path)
    (problem,) = report["problems"]
    assert "dlinfer-ascend 0.2.7" in problem and "pip uninstall dlinfer-ascend" in problem
    assert not report["healthy"]


@pytest.mark.slow
def test_a_vendor_s_library_that_is_missing(tmp_path):
    """Whatever the vendor: its kernels do not load."""
    source = (
        "from dlinfer.vendor import Probe, Vendor\n"
        "def load():\n    import mcoplib_that_is_not_here\n"
        "VENDOR = Vendor('acme', 'privateuseone', 'for a test', lambda: Probe(True, 'one card'), load)\n"
    )
    write_plugin(tmp_path, "acme", source)
    found = row(run_doctor(tmp_path), "acme")
    assert found["state"] == "FAIL" and "No module named 'mcoplib_that_is_not_here'" in found["reason"]
    assert "reinstall" in found["next_step"]


@pytest.mark.parametrize("name", ["ascend", "maca", "camb"])
def test_vendors_of_devices_say_what_is_missing(name):
    """No machine that runs the tests has their packages."""
    if name not in discovery.names():
        pytest.skip(f"no vendor of the name {name} is installed")
    vendor = discovery.get(name)
    answer = discovery.probe(vendor)
    assert not answer.available
    assert "not installed" in answer.reason and answer.next_step


# --- what torch_npu's loading says


@pytest.mark.parametrize(
    ("said", "home", "reason", "step"),
    [
        (NO_CANN, "", "CANN's environment is not set (ASCEND_HOME_PATH is empty)", "set_env.sh"),
        (
            NO_CANN,
            "/opt/cann",
            "CANN in /opt/cann lacks libhccl.so",
            "install the CANN release for torch_npu",
        ),
        (NO_DRIVER, "/opt/cann", "the NPU's driver is missing", "npu-smi info"),
        (NO_NNAL, "/opt/cann", "NNAL is missing", "nnal/atb/set_env.sh"),
        (
            "initialize error 507899\nmore",
            "",
            "torch_npu cannot be loaded: ImportError: initialize error 507899",
            "fit",
        ),
    ],
)
def test_why_torch_npu_does_not_load(said, home, reason, step):
    answer = diagnosis.not_loaded(ImportError(said), {"ASCEND_HOME_PATH": home})
    assert not answer.available
    assert reason in answer.reason and "more" not in answer.reason
    assert step in answer.next_step


def test_the_script_that_is_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "INSTALLED", tmp_path)
    assert diagnosis.not_loaded(ImportError(NO_CANN), {}).next_step.startswith("install CANN")
    script = tmp_path / "ascend-toolkit" / "set_env.sh"
    script.parent.mkdir()
    script.touch()
    assert diagnosis.not_loaded(ImportError(NO_CANN), {}).next_step == f"source {script}"


def test_no_card_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "MANAGER", tmp_path / "davinci_manager")
    absent = diagnosis.no_cards()
    assert "davinci_manager" in absent.reason and "driver" in absent.next_step
    (tmp_path / "davinci_manager").touch()
    assert "ASCEND_RT_VISIBLE_DEVICES" in diagnosis.no_cards().next_step


@pytest.mark.parametrize(
    ("version", "fits"),
    [("", True), ("2.13.0", True), ("2.13.0.post1", True), ("2.9.0", False), ("2.13.1", False)],
)
def test_versions_that_fit(version, fits, monkeypatch):
    monkeypatch.setattr(diagnosis.torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(diagnosis, "torch_npu_version", lambda: version)
    assert (diagnosis.other_version() is None) is fits


def test_nothing_is_installed():
    if sdk.importlib.util.find_spec("torch_npu"):
        pytest.skip("torch_npu is installed")
    assert sdk.probe() == diagnosis.not_installed()


def test_rivals_are_looked_for_by_their_names():
    assert doctor.rivals() == []
    for name in doctor.RIVALS:
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
