"""``dlinfer new-vendor``: what it writes passes at once, is the example, and harms nobody beside it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dlinfer.cli import main, new_vendor
from examples.tiny_models.build import build
from tests.conformance.packages import install, path_with
from tests.e2e.processes import run_process
from tests.fake_device.test_in_a_process import FOLDER as FAKE_DEVICE

EXAMPLE = Path(__file__).parents[2] / "examples/dlinfer-acme"
ASKS_DISCOVERY = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from dlinfer import ops
from dlinfer.errors import DlinferError
from dlinfer.vendor import discovery

def said(name):
    try:
        return discovery.use(name).name
    except DlinferError as error:
        return f"{type(error).__name__}: {error}"

found = {name: said(name) for name in NAMES}
found["sum"] = round(float(ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6).sum()), 3)
print(json.dumps(found))
"""


def said(*folders: Path, names: list[str]) -> dict[str, Any]:
    """What making each vendor active gives, in a process that has these packages, and what the cpu computes then."""
    code = ASKS_DISCOVERY.replace("NAMES", repr(names))
    done = run_process([sys.executable, "-c", code], timeout=200, PYTHONPATH=path_with(*folders))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def written(name: str, folder: Path) -> Path:
    """A folder for the path, with the package of that name in it."""
    install(new_vendor.write(name, folder), folder / "site")
    return folder / "site"


def test_the_example_is_what_is_written():
    files = {
        file.relative_to(EXAMPLE).as_posix(): file.read_text()
        for file in EXAMPLE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert files == new_vendor.rendered("acme")


@pytest.mark.parametrize(
    "name", ["", "x", "Acme", "a-b", "a_b", "4you", "class", "cpu", "cuda", "xpu", "ops"]
)
def test_a_name_that_would_clash_is_refused(name, tmp_path, capsys):
    assert main(["new-vendor", name, "--folder", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path, capsys):
    assert main(["new-vendor", "zeta", "--folder", str(tmp_path)]) == 0
    mine = tmp_path / "dlinfer-zeta/dlinfer_zeta/kernels.py"
    mine.write_text("mine")
    assert main(["new-vendor", "zeta", "--folder", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert mine.read_text() == "mine"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_written_passes_at_once(tmp_path):
    site = written("zeta", tmp_path)
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "dlinfer", "conformance", "zeta", "--json", str(found)]
    done = run_process(command, timeout=800, PYTHONPATH=path_with(site))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(found.read_text())
    assert report["vendor"] == report["device"] == "zeta" and report["distribution"] == "dlinfer-zeta"
    passed = {(one["op"], one["check"]) for one in report["results"] if one["state"] == "passed"}
    for op in ("rms_norm", "silu_and_mul", "fill_kv_cache"):
        assert {check for name, check in passed if name == op} >= {"values", "views", "leaks", "threads"}
    assert {("rms_norm", "graph"), ("silu_and_mul", "dynamic")} <= passed  # through ONNX
    assert "linear" in {one["op"] for one in report["results"] if one["state"] == "unclaimed"}


def test_two_devices_at_once_are_refused_by_name_and_harm_nobody(tmp_path):
    """Whichever package torch loads first has its device; the other says why it has none."""
    folders = [written(name, tmp_path / name) for name in ("eta", "zeta")]
    found = said(*folders, names=["eta", "zeta"])
    working = [name for name in ("eta", "zeta") if found[name] == name]
    assert len(working) == 1 and found["sum"] == 4.0
    (other,) = {"eta", "zeta"} - set(working)
    assert f"one custom device in a process, and this process has '{working[0]}'" in found[other]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "interface=1",
            "interface=7",
            "version 7 of the vendor interface, and this dlinfer has version 1",
        ),
        ("    interface=1", "    from_tomorrow=True", "unexpected keyword argument 'from_tomorrow'"),
        (
            "    from dlinfer.conformance import stand_in\n",
            "    1 / 0\n",
            "its probe failed with ZeroDivisionError",
        ),
        ("    from .kernels import KERNELS\n", "    import acme_sdk\n", "No module named 'acme_sdk'"),
        ("name=NAME", 'name="cpu"', "not a Vendor named 'acme'"),
    ],
    ids=["wrong interface", "unknown field", "raising probe", "missing SDK", "wrong name"],
)
def test_a_fault_in_it_is_said_and_harms_nobody(old, new, words, tmp_path):
    site = written("acme", tmp_path)
    file = site / "dlinfer_acme/vendor.py"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    found = said(site, names=["acme"])
    assert words in found["acme"]
    assert found["sum"] == 4.0


def test_its_ops_do_not_run_on_torch_under_the_policy_error_if_its_interface_is_refused(tmp_path):
    site = written("acme", tmp_path)
    file = site / "dlinfer_acme/vendor.py"
    file.write_text(file.read_text().replace("interface=1", "interface=7"))
    code = (
        "import torch; from dlinfer import ops\n"
        "for device in ('cpu', 'acme'):\n"
        "    ops.rms_norm(torch.ones(1, 4, device=device), torch.ones(4, device=device), 1e-6)\n"
        "    print(device)"
    )
    command = [sys.executable, "-c", code]
    done = run_process(command, timeout=200, PYTHONPATH=path_with(site), DLINFER_FALLBACK="error")
    assert done.returncode == 1 and done.stdout.split() == ["cpu"]
    assert "VendorLoadError: vendor 'acme'" in done.stderr and "Only the reference is left" in done.stderr
    assert "version 7 of the vendor interface" in done.stderr and "author, correct it" in done.stderr


def test_a_second_package_of_the_same_name_is_named_and_harms_nobody(tmp_path):
    first = written("acme", tmp_path)
    second = tmp_path / "second"
    package = new_vendor.write("beta", tmp_path)
    project = package / "pyproject.toml"
    project.write_text(project.read_text().replace("\nbeta = ", "\nacme = "))
    install(package, second)
    found = said(first, second, names=["acme"])
    assert found["acme"].startswith("VendorClashError")
    assert "dlinfer-acme" in found["acme"] and "dlinfer-beta" in found["acme"]
    assert found["sum"] == 4.0


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_lmdeploy_on_the_example_gives_the_tokens_of_the_cpu(tmp_path):
    model = tmp_path / "llama"
    build("llama", model, seed=0, dtype="float32")
    install(EXAMPLE, tmp_path / "site")
    # A script's folder comes first on the path, and the fake device is one of its own.
    job = tmp_path / "job.py"
    job.write_text((FAKE_DEVICE / "lmdeploy_job.py").read_text())

    def answers(*arguments: str, path: str) -> dict[str, Any]:
        command = [sys.executable, str(job), str(model), *arguments]
        done = run_process(command, timeout=550, PYTHONPATH=path, DLINFER_FALLBACK="allow")
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    host = answers("cpu", "eager", path=path_with())
    device = answers("acme", "eager", "graph", path=path_with(tmp_path / "site"))
    for mode in ("eager", "graph"):
        assert device[mode]["devices"] == ["acme"]
        assert device[mode]["greedy"] == host["eager"]["greedy"]
        assert device[mode]["sampled"] == host["eager"]["sampled"]
    assert device["backend"] == ["acme", "gloo", 16]
    assert dict(device["phases"]) == dict.fromkeys(("prefill", "decoding", "logits"), "acme_graphs")
