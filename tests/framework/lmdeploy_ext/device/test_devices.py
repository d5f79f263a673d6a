"""Which device types are the adaptor's, which runner their graphs get, and whose KV cache takes how much."""

import sys
import warnings
from types import SimpleNamespace

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.cli.utils import ArgumentHelper
from lmdeploy.pytorch.backends import get_backend

from dlinfer import settings
from dlinfer.errors import UnknownVendorError
from dlinfer.framework.lmdeploy_ext.device import activation, devices, vendor_devices
from dlinfer.framework.lmdeploy_ext.layers.positions import windows
from dlinfer.framework.lmdeploy_ext.running import backend
from dlinfer.framework.lmdeploy_ext.running.backend import OpsBackend
from dlinfer.vendor import DeviceMemory, discovery

pytestmark = pytest.mark.usefixtures("no_makers")
VENDOR = """
from dlinfer.vendor import Device, DeviceMemory, Probe, Vendor
from dlinfer.vendor.streams import HostStreams

class AcmeDevice(Device):
    communicator = "acmeccl"
    max_batch_size = 4
    streams = HostStreams()

    def memory(self):
        return DeviceMemory(5, 7, "a test", shared=False)

VENDOR = Vendor(
    "{name}", "{device}", "made for a test", lambda: Probe({available}, "made for a test"), lambda: {{}},
    load_device=AcmeDevice, framework_device="{called}",
)
"""


def vendor(name: str, device: str = "npu", called: str = "", available: bool = True) -> str:
    return VENDOR.format(name=name, device=device, called=called, available=available)


def test_a_device_type_is_ours_where_a_vendor_puts_frameworks_on_it(plugins):
    assert devices.served() == ["cpu"]
    plugins("acme", vendor("acme"))
    plugins("beta", vendor("beta", called="card"))
    plugins("gone", vendor("gone", available=False))
    assert devices.served() == ["acme", "card", "cpu"]
    assert devices.torch_device("card") == "npu" and devices.torch_device("cpu") == "cpu"
    for name in ("beta", "openvino", "reference", "cuda", "maca"):
        assert not devices.serves(name)
    assert vendor_devices.usable() == ["acme", "card", "cpu", "cuda"]
    with pytest.raises(UnknownVendorError, match=r"'beta'.*acme, card, cpu, cuda"):
        PytorchEngineConfig(device_type="beta")


@pytest.mark.parametrize(
    ("device", "given", "chosen"),
    [("cpu", {}, 1024), ("cpu", {"max_prefill_token_num": 8192}, 8192), ("acme", {}, 8192)],
)
def test_a_prefill_is_as_large_as_the_vendor_says_where_the_user_says_nothing(
    plugins, monkeypatch, device, given, chosen
):
    plugins("acme", vendor("acme"))
    monkeypatch.setattr(activation, "activate", lambda device_type: None)  # another may be active
    config = PytorchEngineConfig(device_type=device, **given)
    assert config.max_prefill_token_num == chosen


def test_cuda_loads_no_vendor(plugins):
    plugins("broken", "raise RuntimeError('loaded')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not devices.serves("cuda") and devices.serves("cpu")
    assert "broken" not in discovery._loaded and "broken_package_plugin" not in sys.modules


def test_the_command_line_offers_them(plugins):
    import argparse

    plugins("beta", vendor("beta", called="card"))
    parser = argparse.ArgumentParser()
    ArgumentHelper.device(parser)
    assert parser.parse_args(["--device", "card"]).device == "card"


def test_one_of_lmdeploys_own_devices_is_ours_where_its_vendor_puts_frameworks_on_it(plugins):
    plugins("maca", vendor("maca", device="xla"))
    assert devices.serves("maca") and devices.torch_device("maca") == "xla"
    assert vendor_devices.usable() == ["cpu", "maca", "cuda"]


LEFT_TO_LMDEPLOY = """
from dlinfer.vendor import Probe, Vendor

VENDOR = Vendor("maca", "xla", "made for a test", lambda: Probe(True, "made for a test"), lambda: {})
"""


def test_a_vendor_that_leaves_its_device_to_lmdeploy_is_active_before_lmdeploys_backend_starts(plugins):
    """LMDeploy's backends ask ``dlinfer.vendor.vendor_name`` how weights of experts are to lie."""
    import dlinfer.vendor

    plugins("maca", LEFT_TO_LMDEPLOY)
    assert get_backend("maca").get_name() == "maca"
    assert discovery.active("xla") is discovery.get("maca")
    assert dlinfer.vendor.vendor_name == "maca"


@pytest.fixture
def runner(monkeypatch):
    """``runner(eager)``: which class is built to run a model."""
    PytorchEngineConfig(device_type="cpu")
    monkeypatch.setattr(windows, "apply", lambda *args: None)
    for name in ("EagerRunner", "CompiledRunner"):
        monkeypatch.setattr(backend, name, lambda *args, name=name: name)

    def built(eager: bool = False):
        none = SimpleNamespace(llm_config=None, hf_config=None)
        blocks = SimpleNamespace(kernel_block_size=16)
        return OpsBackend.build_graph_runner(None, none, blocks, SimpleNamespace(eager_mode=eager), None)  # pyright: ignore[reportArgumentType]

    return built


def test_graphs_run_in_the_vendor_s_runner_where_it_has_one(runner, monkeypatch):
    assert runner() == "CompiledRunner" and runner(eager=True) == "EagerRunner"
    monkeypatch.setattr(
        activation.device(), "graph_runner", lambda: lambda *args: ("the vendor's", len(args))
    )
    assert runner() == ("the vendor's", 5)
    assert runner(eager=True) == "EagerRunner"


def test_a_vendor_of_kernels_alone_runs_eagerly(runner, plugins):
    plugins("acme", LEFT_TO_LMDEPLOY.replace("maca", "acme").replace("xla", "cpu"))
    discovery.use("acme")
    with settings.override(engine=""):
        assert runner() == "EagerRunner"


def test_lmdeploy_is_told_what_the_vendor_says_of_memory(monkeypatch):
    from lmdeploy.pytorch.utils import get_gpu_memory

    PytorchEngineConfig(device_type="cpu")
    said = DeviceMemory(3, 9, "a test", shared=True)
    monkeypatch.setattr(activation.device(), "memory", lambda: said)
    assert get_gpu_memory() == (3, 9)
