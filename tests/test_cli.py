"""The ``dlinfer`` command: what doctor says of healthy, broken and missing parts, for people and as JSON."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest
import torch

import dlinfer
from dlinfer.cli import doctor, main
from dlinfer.errors import VendorLoadError
from dlinfer.framework.lmdeploy_ext import selfcheck
from dlinfer.ops import registry
from dlinfer.vendor import discovery
from tests.plugins.builder import healthy

DOCS = Path(__file__).parents[1] / "docs/reference/json.md"


@pytest.fixture(autouse=True)
def quick_framework_check(request, monkeypatch):
    """Most tests need no child process that imports a framework."""
    if "real_frameworks" not in request.fixturenames:
        state = selfcheck.FrameworkState(
            "lmdeploy", None, None, "", "absent", "not installed", "install it", ""
        )
        monkeypatch.setattr(selfcheck, "check", lambda: state)


@pytest.fixture
def real_frameworks(monkeypatch):
    """Asks for the check as it is, with time for a machine that does much else."""
    monkeypatch.setattr(selfcheck, "_TIMEOUT_SECONDS", 500)


@pytest.fixture
def environment(monkeypatch):
    """Sets DLINFER_* variables and lets this process read them anew."""
    for name in [name for name in os.environ if name.startswith("DLINFER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("dlinfer.settings._current", None)
    return monkeypatch.setenv


def run(capsys, *argv: str) -> tuple[int, str]:
    status = main(list(argv))
    return status, capsys.readouterr().out


def report(capsys, status: int = 0) -> dict:
    found, out = run(capsys, "doctor", "--json")
    assert found == status
    return json.loads(out)


def vendor(found: dict, name: str) -> dict:
    return next(row for row in found["vendors"] if row["name"] == name)


# --- the command itself


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"dlinfer {dlinfer.__version__}\n"


def test_a_command_is_required(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "COMMAND" in capsys.readouterr().err


def test_python_dash_m_is_the_command():
    command = [sys.executable, "-m", "dlinfer", "--version"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True).stdout
    assert out == f"dlinfer {dlinfer.__version__}\n"


# --- a machine where all is well


def test_json_follows_the_documented_schema(capsys, environment):
    found = report(capsys)
    keys = [field.name for field in fields(doctor.Report)]
    assert list(found) == keys
    documented = [line.split("`")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert documented[: len(keys)] == keys
    text = DOCS.read_text()
    for part in (
        doctor.Versions,
        doctor.Cpu,
        doctor.MemoryBound,
        doctor.VendorState,
        doctor.EngineSelfTest,
        doctor.FailedCase,
        selfcheck.FrameworkState,
    ):
        assert [field.name for field in fields(part) if f"`{field.name}`" not in text] == []
    assert found["schema"] == doctor.SCHEMA == 3


def test_healthy_report(capsys, environment):
    found = report(capsys)
    assert found["healthy"] is True
    assert found["problems"] == []
    assert found["versions"]["torch"] == torch.__version__
    assert found["defaults"]["cpu"] == "cpu"
    assert found["fallback_policy"] == "warn"
    assert vendor(found, "cpu")["state"] == vendor(found, "reference")["state"] == "PASS"
    assert list(found["ops"]) == list(registry())
    assert {answers["reference"] for answers in found["ops"].values()} == {"reference"}
    assert found["memory"][0]["available_bytes"] == min(row["available_bytes"] for row in found["memory"])


def test_text_names_everything(capsys, environment):
    status, out = run(capsys, "doctor")
    assert status == 0
    for word in ("torch", "lmdeploy", "absent", "PASS", "GiB", "rms_norm", "DLINFER_FALLBACK", "default"):
        assert word in out
    assert "\x1b" not in out  # no colours in a pipe


def test_lmdeploy_is_not_imported():
    code = (
        "import sys, contextlib, io\nfrom dlinfer.cli import doctor\n"
        "from dlinfer.framework.lmdeploy_ext import selfcheck\nselfcheck._try_device = lambda *_: ('', '')\n"
        "doctor.collect()\nassert 'lmdeploy' not in sys.modules and 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


# --- vendors that cannot run


def test_unavailable_vendor_fails_with_reason_and_next_step(capsys, environment, plugins):
    plugins("acme", healthy("acme", "npu", probe="Probe(False, 'no card found', 'plug one in')"))
    found = report(capsys)
    row = vendor(found, "acme")
    assert (row["state"], row["reason"], row["next_step"]) == ("FAIL", "no card found", "plug one in")
    assert {answers["acme"] for answers in found["ops"].values()} == {"none"}
    _, out = run(capsys, "doctor")
    assert "no card found" in out
    assert "next step: plug one in" in out


def test_the_text_of_a_failure_is_shown_as_it_is(capsys, environment, monkeypatch):
    problem = "install it with: pip install 'dlinfer[sophgo]'"
    selftest = doctor.EngineSelfTest("sophgo", "sophgo", 0, 0, [], problem)
    monkeypatch.setattr(doctor, "_selftests", lambda *_: [selftest])
    assert problem in run(capsys, "doctor")[1]


LOADS = healthy("acme", "cpu", priority=-5)
NEEDS_SDK = LOADS.replace("return {}", "import acme_sdk")
UNKNOWN_OP = LOADS.replace("return {}", "return {'rms_norn': print}")
BAD_SIGNATURE = LOADS.replace("return {}", "return {'rms_norm': lambda x, eps, weight: x}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import acme_sdk", "No module named 'acme_sdk'"),
        ("VENDOR = 3", "it is 3, not a Vendor"),
        (healthy("acme", "cpu", probe="1 / 0"), "its probe failed with ZeroDivisionError"),
        (NEEDS_SDK, "its kernels cannot be loaded: ModuleNotFoundError: No module named 'acme_sdk'"),
        (UNKNOWN_OP, "'rms_norn', but there is no such op"),
        (BAD_SIGNATURE, "the kernel for 'rms_norm' takes"),
    ],
    ids=["import", "wrong object", "probe", "kernels", "unknown op", "signature"],
)
def test_a_broken_plugin_fails_alone(capsys, environment, plugins, source, reason):
    plugins("acme", source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dlinfer.ops.core.kernels._authors", {})
        found = report(capsys)
    row = vendor(found, "acme")
    assert row["state"] == "FAIL"
    assert reason in row["reason"]
    assert vendor(found, "cpu")["state"] == "PASS"
    assert found["defaults"]["cpu"] == "cpu"


def test_a_default_that_fails_is_a_problem(capsys, environment, plugins):
    plugins("wrecked", healthy("wrecked", "cpu", priority=15).replace("return {}", "import acme_sdk"))
    assert "'wrecked' is the default for device cpu, but it fails" in report(capsys, status=1)["problems"][0]
    environment("DLINFER_VENDOR", "cpu")
    dlinfer.settings._current = None
    assert report(capsys)["defaults"]["cpu"] == "cpu"


def test_a_name_clash_names_both(capsys, environment, plugins):
    plugins("acme", healthy("acme", "cpu"), distribution="acme-one")
    plugins("acme", healthy("acme", "cpu"), distribution="acme-two")
    row = vendor(report(capsys), "acme")
    assert row["state"] == "FAIL"
    assert "acme-one" in row["reason"]
    assert "acme-two" in row["reason"]


def test_only_the_reference_left_is_status_1(capsys, environment, monkeypatch):
    def get(name: str):
        if name != "reference":
            raise VendorLoadError(vendor=name, source="a test", detail="broken")
        return original(name)

    original = discovery.get
    monkeypatch.setattr(discovery, "get", get)
    assert report(capsys, status=1)["healthy"] is False
    _, out = run(capsys, "doctor")
    assert "FAIL: only the reference vendor can run here" in out


def test_native_reference_and_none(capsys, environment, plugins):
    kernel = "return {'rms_norm': lambda x, weight, eps: x}"
    plugins("halfway", healthy("halfway", "cpu", priority=-5).replace("return {}", kernel))
    answers = report(capsys)["ops"]
    assert (answers["rms_norm"]["halfway"], answers["linear"]["halfway"]) == ("native", "reference")
    environment("DLINFER_FALLBACK", "error")
    dlinfer.settings._current = None
    answers = report(capsys)["ops"]
    assert (answers["rms_norm"]["halfway"], answers["linear"]["halfway"]) == ("native", "none")


def test_a_hosts_kernel_is_named_as_its_vendors(capsys, environment, plugins):
    """Neither that of a vendor without any, nor one that a vendor wraps, is the vendor's own."""
    wraps = """
    import functools
    from dlinfer.vendor.cpu.kernels import KERNELS

    @functools.wraps(KERNELS["rms_norm"])
    def rms_norm(x, weight, eps):
        return KERNELS["rms_norm"](x, weight, eps)

    return KERNELS | {"rms_norm": rms_norm, "silu_and_mul": lambda x: x}
"""
    plugins("wrapper", healthy("wrapper", "cpu", priority=-5).replace("return {}", wraps.strip()))
    answers = report(capsys)["ops"]
    assert {op: answers[op]["wrapper"] for op in ("rms_norm", "silu_and_mul")} == {
        "rms_norm": "cpu",
        "silu_and_mul": "native",
    }
    for name in {"openvino", "onnxruntime", "qaic", "sophgo", "megengine"} & {
        row["name"] for row in report(capsys)["vendors"] if row["state"] == "PASS"
    }:
        assert {row[name] for row in answers.values()} == {"cpu"}, name
    assert {row["cpu"] for row in answers.values()} == {"native"}


# --- settings


def test_settings_show_their_source(capsys, environment):
    environment("DLINFER_FALLBACK", "allow")
    environment("DLINFER_FALBACK", "error")
    found = report(capsys)
    rows = {row["variable"]: row for row in found["settings"]}
    assert (rows["DLINFER_FALLBACK"]["value"], rows["DLINFER_FALLBACK"]["source"]) == ("allow", "environment")
    assert rows["DLINFER_VENDOR"]["source"] == "default"
    assert found["unknown_variables"] == ["DLINFER_FALBACK"]
    assert found["fallback_policy"] == "allow"


def test_a_wrong_setting_is_a_problem_not_a_crash(capsys, environment):
    environment("DLINFER_FALLBACK", "eror")
    found = report(capsys, status=1)
    assert "expected one of allow, warn, error" in found["problems"][0]
    _, out = run(capsys, "doctor")
    assert "FAIL: solve the problems above first" in out


def test_a_wrong_setting_does_not_end_a_new_process():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DLINFER_")}
    done = subprocess.run(
        [sys.executable, "-m", "dlinfer", "doctor", "--json"],
        env={**environment, "DLINFER_CPU_WEIGHTS": "plain"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert "expected one of auto, kept, bf12, int8, int4" in found["problems"][0]
    assert any(vendor["name"] == "cpu" and vendor["state"] == "PASS" for vendor in found["vendors"])
    rows = {row["variable"]: row["value"] for row in found["settings"]}
    assert rows["DLINFER_CPU_WEIGHTS"] == "plain"


def test_an_unknown_vendor_in_the_setting_is_a_problem(capsys, environment):
    environment("DLINFER_VENDOR", "cup")
    assert "unknown vendor or device_type 'cup'" in report(capsys, status=1)["problems"][0]


# --- frameworks


def test_a_framework_that_is_not_installed(real_frameworks, monkeypatch):
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(selfcheck.metadata, "version", absent)
    state = selfcheck.check()
    assert (state.state, state.version, state.tested) == ("absent", None, None)
    assert "pip install" in state.next_step


def fake_lmdeploy(folder: Path, source: str, version: str = "0.18.0") -> None:
    """A package named lmdeploy that stands in front of the real one."""
    (folder / "lmdeploy").mkdir()
    (folder / "lmdeploy/__init__.py").write_text(source)
    info = folder / f"lmdeploy-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lmdeploy\nVersion: {version}\n")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed(source, version)`` makes a fake lmdeploy the installed one, here and in child processes."""

    def install(source: str, version: str = "0.18.0") -> None:
        fake_lmdeploy(tmp_path, source, version)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        importlib.invalidate_caches()
        monkeypatch.setattr(selfcheck, "_hook_is_installed", lambda: True)

    return install


FINE = "class PytorchEngineConfig:\n    def __init__(self, device_type): pass\n"


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("import torchvision_of_old", "ModuleNotFoundError: No module named 'torchvision_of_old'"),
        ("import os; os._exit(3)", "ended the process with status 3: no message"),
        (FINE.replace("pass", "assert device_type == 'cuda', 'no ' + device_type"), "AssertionError: no cpu"),
        ("raise SystemExit('stop')", "SystemExit: stop"),
    ],
    ids=["broken", "dies", "refuses", "exits"],
)
def test_a_framework_that_does_not_work(real_frameworks, installed, source, detail):
    installed(source)
    state = selfcheck.check()
    assert state.state == "failed"
    assert detail in state.detail
    assert state.next_step


def test_a_framework_outside_the_tested_range(real_frameworks, installed):
    installed(FINE, version="0.99.0")
    state = selfcheck.check()
    assert (state.version, state.tested) == ("0.99.0", False)
    assert "outside the tested range" in state.note


def test_autoload_switched_off_gives_the_line_to_add(real_frameworks, installed, monkeypatch):
    installed(FINE)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    state = selfcheck.check()
    assert (state.state, state.traceback) == ("manual", "")
    assert "import dlinfer.framework.lmdeploy_ext" in state.next_step


def test_dlinfer_on_the_path_without_its_entry_point(real_frameworks, installed, monkeypatch):
    installed(FINE)
    monkeypatch.setattr(selfcheck, "_hook_is_installed", lambda: False)
    state = selfcheck.check()
    assert state.state == "failed"
    assert "not installed" in state.detail


def test_what_failed_in_the_hook_is_shown(real_frameworks, installed, capsys, environment):
    installed("from dlinfer import _autoload\n_autoload._failure = 'Traceback: the patches broke'\n" + FINE)
    found = report(capsys)
    (framework,) = found["frameworks"]
    assert framework["state"] == "failed"
    assert framework["traceback"] == "Traceback: the patches broke"
    _, out = run(capsys, "doctor")
    assert "the patches broke" in out


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.skipif(
    not selfcheck._hook_is_installed(), reason="needs dlinfer installed with its entry points"
)
def test_the_installed_lmdeploy_is_ready(real_frameworks):
    state = selfcheck.check()
    assert state.state == "ready", state
    assert state.tested is True
