"""device_type maca and camb: LMDeploy's own, of no use without a vendor; ascend and camb, without torch's package."""

import subprocess
import sys
import types
from importlib.metadata import entry_points

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.backends import get_backend
from lmdeploy.pytorch.backends.selector import init_backend
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
from lmdeploy.utils import try_import_deeplink

from dlinfer.errors import DeviceWithoutVendorError, UnknownVendorError, VendorUnavailableError
from dlinfer.framework.lmdeploy_ext.device import activation, vendor_devices
from dlinfer.vendor import ascend, camb, discovery

pytestmark = pytest.mark.usefixtures("no_makers")
DEVICES = ("maca", "camb")
PLUGIN = """
from dlinfer.vendor import Probe, Vendor

VENDOR = Vendor("{name}", "npu", "a plugin of tests", lambda: Probe(True, "it is there"), lambda: {{}})
"""


asked = pytest.mark.parametrize(
    "ask",
    [
        lambda device: PytorchEngineConfig(device_type=device),
        try_import_deeplink,
        # the first that workers of the mp and ray executors do
        init_backend,
        get_backend,
    ],
    ids=["config", "deeplink", "worker", "backend"],
)


@pytest.fixture
def without_ours(monkeypatch):
    """As if dlinfer itself brought no vendor for these devices."""
    real = discovery.entry_points

    def others(**asked):
        return [
            one for one in real(**asked) if one.name not in DEVICES or not one.value.startswith("dlinfer.")
        ]

    monkeypatch.setattr(discovery, "entry_points", others)


@pytest.mark.parametrize(
    ("vendor", "package"), [(ascend.VENDOR, "torch_npu"), (camb.VENDOR, "torch_mlu")], ids=["ascend", "camb"]
)
@asked
def test_without_its_torch_package_a_vendor_says_so(ask, vendor, package, monkeypatch):
    monkeypatch.setitem(discovery._loaded, vendor.name, vendor)
    monkeypatch.setattr(discovery, "names", lambda: [vendor.name, "cpu", "reference"])
    monkeypatch.setattr(activation, "_active", None)  # whatever ran before in this process
    said = rf"'{vendor.name}'.*{package} is not installed.*docs/(start/install|vendors/{vendor.name})\.md"
    with pytest.raises(VendorUnavailableError, match=said):
        ask(vendor.name)
    assert vendor.name not in vendor_devices.usable()


def test_these_are_lmdeploys_devices_but_cuda():
    assert set(vendor_devices.NEED_VENDOR) == {"ascend", *DEVICES}


@pytest.mark.parametrize("device", DEVICES)
@asked
def test_without_a_vendor_it_is_refused_with_what_is_there_and_what_is_not(device, ask, without_ours):
    with pytest.raises(DeviceWithoutVendorError) as caught:
        ask(device)
    text = str(caught.value)
    for words in (repr(device), "op interface", "kernels", "graph runner", "Next step", "dlinfer.vendors"):
        assert words in text


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_set_later_is_refused_when_the_engine_starts(device, without_ours):
    config = PytorchEngineConfig(device_type="cuda", max_batch_size=1)
    config.device_type = device
    with pytest.raises(DeviceWithoutVendorError, match=device):
        ConfigBuilder.update_engine_config(config)


@pytest.mark.parametrize("device", DEVICES)
def test_with_a_vendor_lmdeploy_goes_its_own_way(device, plugins, without_ours):
    plugins(device, PLUGIN.format(name=device))
    assert PytorchEngineConfig(device_type=device).device_type == device
    assert device in vendor_devices.usable()
    others = [name for name in DEVICES if name != device]
    with pytest.raises(DeviceWithoutVendorError):
        PytorchEngineConfig(device_type=others[0])
    with pytest.raises(UnknownVendorError, match=rf"Available: cpu, cuda, {device}\."):
        PytorchEngineConfig(device_type="tpu")


def test_cuda_is_left_to_lmdeploy():
    assert PytorchEngineConfig(device_type="cuda", max_batch_size=1).device_type == "cuda"
    vendor_devices.check_vendor("cuda")
    assert isinstance(get_backend("cuda"), type | types.ModuleType)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["serve", "api_server"], ["chat"]], ids=" ".join)
def test_the_command_line_says_so_in_one_line(command, tmp_path):
    """Before it looks for the model, which is not there."""
    done = subprocess.run(
        [sys.executable, "-m", "lmdeploy", *command, str(tmp_path / "no-model"), "--device", "maca"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    installed = bool(entry_points(group=discovery.GROUP, name="maca"))  # the child sees what is installed
    assert "'maca'" in line
    assert ("mcoplib is not installed" if installed else "no installed package provides") in line
    assert "Traceback" not in done.stderr
