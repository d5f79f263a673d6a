"""Vendors are found through entry points, loaded lazily, chosen by device, and faulty ones are named."""

import importlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import dlinfer.vendor
from dlinfer import settings
from dlinfer.errors import (
    DeviceUnknownError,
    EngineUnavailableError,
    UnknownVendorError,
    VendorClashError,
    VendorLoadError,
    VendorUnavailableError,
)
from dlinfer.graph.engine import find_engine
from dlinfer.vendor import KVCacheLayout, Vendor, discovery
from tests.plugins.builder import MINI, healthy

# --- finding and loading


def test_dlinfers_own_vendors_are_entry_points_like_all_others():
    assert {"cpu", "onnxruntime", "openvino", "qaic", "reference"} <= set(discovery.names())


def test_names_load_nothing(plugins):
    plugins("broken", "raise RuntimeError('loaded')")
    assert "broken" in discovery.names()
    assert "broken_package_plugin" not in sys.modules


def test_a_vendor_is_loaded_once(plugins):
    plugins("acme", healthy("acme", "cpu"))
    assert discovery.get("acme") is discovery.get("acme")


def test_unknown_vendor_names_the_available_ones(plugins):
    with pytest.raises(UnknownVendorError, match=r"'cup'.*cpu, .*reference") as caught:
        discovery.get("cup")
    assert "dlinfer doctor" in str(caught.value)


def test_a_name_clash_names_both_packages(plugins):
    plugins("acme", healthy("acme", "cpu"), distribution="acme-one")
    plugins("acme", healthy("acme", "cpu"), distribution="acme-two")
    with pytest.raises(VendorClashError, match=r"'acme'.*acme-(one|two).*acme-(one|two)") as caught:
        discovery.get("acme")
    assert {"acme-one", "acme-two"} == {caught.value.fields[key].split()[-1] for key in ("first", "second")}


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import acme_sdk", "ModuleNotFoundError: No module named 'acme_sdk'"),
        ("1 / 0", "ZeroDivisionError"),
        ("", "AttributeError: .*VENDOR"),
        ("VENDOR = 'acme'", "it is 'acme', not a Vendor named 'acme'"),
        (healthy("other", "cpu"), "not a Vendor named 'acme'"),
    ],
    ids=["missing SDK", "raises", "empty module", "wrong object", "wrong name"],
)
def test_a_faulty_plugin_is_named_with_its_package(plugins, source, complaint):
    plugins("acme", source)
    with pytest.raises(VendorLoadError, match=complaint) as caught:
        discovery.get("acme")
    assert "acme-package" in str(caught.value)


def test_a_faulty_plugin_can_be_mended_in_the_same_process(plugins, tmp_path):
    plugins("acme", "1 / 0")
    with pytest.raises(VendorLoadError):
        discovery.get("acme")
    (tmp_path / "acme_package_plugin.py").write_text(healthy("acme", "cpu"))
    importlib.invalidate_caches()
    assert discovery.get("acme").name == "acme"


HOST = """
from dlinfer.vendor import Probe, Vendor, discovery

def load_kernels():
    return {{"from {name}": None, **discovery.kernels_of(discovery.host(VENDOR))}}

VENDOR = Vendor("{name}", "cpu", "made for a test", lambda: Probe(True, ""), load_kernels, priority={priority})
"""


BARE = """
from dlinfer.vendor import Probe, Vendor

VENDOR = Vendor("{name}", "cpu", "made for a test", lambda: Probe(True, ""), priority={priority})
"""


def test_vendors_that_ask_for_the_host_s_kernels_do_not_ask_each_other_for_ever(plugins):
    for name, priority in (("acme", 91), ("beta", 92)):
        plugins(name, HOST.format(name=name, priority=priority))
    found = discovery.kernels_of(discovery.get("acme"))
    assert {"from acme", "from beta"} <= set(found)
    assert set(discovery.kernels_of(discovery.get("cpu"))) <= set(found)
    assert set(discovery.kernels_of(discovery.get("beta"))) == set(found)


def test_a_vendor_without_kernels_has_the_host_s_which_lays_caches_out_alike(plugins):
    for name, priority in (("acme", 91), ("beta", 92)):
        plugins(name, BARE.format(name=name, priority=priority))
    for name in ("acme", "beta"):
        assert discovery.host(discovery.get(name)) is discovery.get("cpu")
        assert discovery.kernels_of(discovery.get(name)) == discovery.kernels_of(discovery.get("cpu"))
    with pytest.raises(VendorUnavailableError, match="no kernels of its own"):
        discovery.host(replace(discovery.get("acme"), kv_cache_layout=KVCacheLayout("DSHB")))


# --- choosing


def test_unavailable_vendor_says_why_and_what_to_do(plugins):
    plugins("acme", healthy("acme", "npu", probe="Probe(False, 'no card found', 'plug one in')"))
    with pytest.raises(VendorUnavailableError, match=r"'acme'.*no card found.*plug one in"):
        discovery.use("acme")
    assert discovery.activate_default("npu") is discovery.get("reference")  # which serves every device
    assert discovery.active("npu") is discovery.get("reference")


def test_a_probe_that_raises_counts_as_unavailable(plugins):
    plugins("acme", healthy("acme", "npu", priority=5, probe="1 / 0"))
    with pytest.raises(VendorUnavailableError, match="its probe failed with ZeroDivisionError"):
        discovery.use("acme")
    assert discovery.default("npu") is discovery.get("reference")


def test_highest_priority_is_the_default(plugins):
    plugins("acme", healthy("acme", "cpu", priority=15))
    plugins("beta", healthy("beta", "cpu", priority=19))
    assert discovery.default("cpu") is discovery.get("beta")
    assert discovery.active("cpu") is None  # asking activates nothing
    assert discovery.activate_default("cpu") is discovery.get("beta")
    assert discovery.active("cpu") is discovery.get("beta")


def test_an_unavailable_vendor_is_passed_over_whatever_its_priority(plugins):
    plugins("acme", healthy("acme", "cpu", priority=19, probe="Probe(False, 'no')"))
    assert discovery.activate_default("cpu") is discovery.get("cpu")


def test_the_setting_goes_before_priority(plugins):
    with settings.override(vendor="reference"):
        assert discovery.activate_default("cpu") is discovery.get("reference")


def test_the_setting_is_for_its_own_device_only(plugins):
    plugins("acme", healthy("acme", "npu"))
    with settings.override(vendor="acme"):
        assert discovery.activate_default("cpu") is discovery.get("cpu")
        assert discovery.activate_default("npu") is discovery.get("acme")


def test_the_vendor_that_provides_the_wanted_engine_goes_before_priority(plugins):
    """An engine lays the KV cache out its own way, so its vendor must be the active one."""
    plugins("acme", healthy("acme", "cpu", engines=("acme-graphs",)))
    plugins("beta", healthy("beta", "npu", engines=("acme-graphs",)))
    with settings.override(engine="acme-graphs"):
        assert discovery.default("cpu") is discovery.get("acme")
    with settings.override(engine="acme-graphs", vendor="reference"):
        assert discovery.default("cpu") is discovery.get("reference")
    with settings.override(
        engine="of nobody"
    ):  # an error for who asks for the engine, not for who needs a kernel
        assert discovery.default("cpu") is discovery.get("cpu")


def test_an_unavailable_vendor_is_not_chosen_for_its_engine(plugins):
    plugins("acme", healthy("acme", "cpu", engines=("graphs",), probe="Probe(False, 'no SDK')"))
    with settings.override(engine="graphs"):
        assert discovery.default("cpu") is discovery.get("cpu")


def test_a_misspelt_setting_is_an_error_not_a_default(plugins):
    with settings.override(vendor="cup"), pytest.raises(UnknownVendorError):
        discovery.activate_default("cpu")


def test_a_faulty_plugin_that_nobody_asked_for_is_passed_over_with_a_warning(plugins):
    plugins("acme", "1 / 0")
    with pytest.warns(discovery.VendorWarning, match="acme-package"):
        assert discovery.activate_default("cpu") is discovery.get("cpu")


@pytest.mark.parametrize(
    "source", [healthy("acme", "npu").replace("engines=", "interface=7, engines="), "1 / 0"]
)
def test_under_the_policy_error_the_reference_does_not_stand_in_for_a_faulty_plugin(plugins, source):
    plugins("acme", source)
    with (
        settings.override(fallback="error"),
        pytest.warns(discovery.VendorWarning),
        pytest.raises(VendorLoadError, match=r"'acme'.*As the package's author, correct it") as caught,
    ):
        discovery.activate_default("npu")
    assert "DLINFER_VENDOR=reference" in caught.value.__notes__[-1]
    assert discovery.active("npu") is None
    with settings.override(fallback="error", vendor="reference"):
        assert discovery.default("npu") is discovery.get("reference")
    with settings.override(fallback="error"), pytest.warns(discovery.VendorWarning):
        assert discovery.default("cpu") is discovery.get("cpu")
    with settings.override(fallback="warn"), pytest.warns(discovery.VendorWarning):
        assert discovery.default("npu") is discovery.get("reference")


def test_a_faulty_plugin_that_the_setting_asks_for_is_an_error(plugins):
    plugins("acme", "1 / 0")
    with settings.override(vendor="acme"), pytest.raises(VendorLoadError):
        discovery.activate_default("cpu")


def test_use_takes_effect_and_the_newest_is_vendor_name(plugins):
    assert discovery.use("reference") is discovery.active("cpu")
    assert dlinfer.vendor.vendor_name == "reference"
    discovery.use("cpu")
    assert dlinfer.vendor.vendor_name == "cpu"


def test_vendor_name_is_the_default_of_cpu_before_any_use(plugins):
    assert dlinfer.vendor.vendor_name == "cpu"


def test_two_devices_have_a_vendor_each(plugins):
    plugins("acme", healthy("acme", "npu"))
    discovery.use("cpu")
    discovery.use("acme")
    assert discovery.active("cpu") is discovery.get("cpu")
    assert discovery.active("npu") is discovery.get("acme")
    discovery.use("reference", device_type="npu")
    assert discovery.active("cpu") is discovery.get("cpu")
    assert dlinfer.vendor.vendor_name == "reference"


def test_a_vendor_is_refused_for_a_device_that_it_does_not_serve(plugins):
    with pytest.raises(VendorUnavailableError, match="it serves cpu, not npu"):
        discovery.use("cpu", device_type="npu")


# --- telling others


def test_listeners_hear_of_changes_before_they_take_effect(plugins):
    heard = []
    discovery.use("reference")
    discovery.on_activation(
        lambda device, vendor: heard.append((device, vendor.name, discovery.active(device)))
    )
    discovery.use("cpu")
    discovery.use("cpu")  # no change
    reference = discovery.get("reference")
    assert heard == [("cpu", "reference", reference), ("cpu", "cpu", reference)]


def test_a_vendor_whose_kernels_fail_to_load_leaves_the_active_one(plugins):
    plugins("acme", healthy("acme", "cpu"))
    discovery.use("cpu")

    def bind(device: str, vendor: Vendor) -> None:
        if vendor.name != "cpu":
            raise ImportError("libacme.so not found")

    discovery.on_activation(bind)
    with pytest.raises(VendorLoadError, match=r"'acme' \(its kernels\).*ImportError: libacme"):
        discovery.use("acme")
    assert discovery.active("cpu") is discovery.get("cpu")


def test_the_first_activation_from_many_threads_happens_once(plugins):
    threads = 16
    plugins("acme", "import time\ntime.sleep(0.05)\n" + healthy("acme", "cpu", priority=19))
    heard, start = [], threading.Barrier(threads)
    discovery.on_activation(lambda device, vendor: heard.append(vendor))

    def first_call(_: int):
        start.wait(300)
        return discovery.activate_default("cpu")

    with ThreadPoolExecutor(threads) as pool:
        chosen = list(pool.map(first_call, range(threads)))
    assert len(set(map(id, chosen))) == 1
    assert heard == [discovery.get("acme")]


# --- what frameworks are told of devices

DEVICE = """
from dlinfer.vendor import Device, DeviceMemory, Probe, Vendor
from dlinfer.vendor.streams import HostStreams

class AcmeDevice(Device):
    communicator = "{name}ccl"
    max_batch_size = 4

    def __init__(self):
        self.streams = HostStreams()

    def memory(self):
        return DeviceMemory(5, 7, "a test", shared=False)

def load_device():
    {before}
    return AcmeDevice()

VENDOR = Vendor(
    "{name}", "{device}", "made for a test", lambda: Probe({available}, "made for a test"), lambda: {{}},
    load_device={load}, priority={priority}, framework_device="{called}",
)
"""


def device_plugin(name: str, device: str = "cpu", **changes: object) -> str:
    usual = {"before": "", "available": True, "load": "load_device", "priority": 0, "called": ""}
    return DEVICE.format(name=name, device=device, **(usual | changes))


def test_the_active_vendor_says_what_its_device_is(plugins):
    plugins("acme", device_plugin("acme"))
    assert discovery.device("cpu").communicator == "gloo"
    discovery.use("acme")
    said = discovery.device("cpu")
    assert (said.communicator, said.memory().total) == ("acmeccl", 7)
    assert discovery.device("cpu") is said  # loaded once


def test_a_vendor_that_says_nothing_leaves_it_to_another_of_the_same_device(plugins):
    plugins("acme", device_plugin("acme", load=None))
    plugins("beta", device_plugin("beta", device="npu"))
    discovery.use("acme")
    assert discovery.device("cpu") is discovery.device_of(discovery.get("cpu"))


def test_a_device_of_which_nobody_says_anything_is_an_error(plugins):
    plugins("acme", device_plugin("acme", device="xla", load=None))
    with pytest.raises(DeviceUnknownError, match=r"'xla'.*acme"):
        discovery.device("xla")


def test_a_device_whose_vendor_is_not_available_says_why(plugins):
    plugins("acme", device_plugin("acme", device="xla", available=False))
    with pytest.raises(VendorUnavailableError, match=r"'acme'.*made for a test"):
        discovery.device("xla")


def test_a_device_that_cannot_be_loaded_names_its_vendor(plugins):
    plugins("acme", device_plugin("acme", before="1 / 0"))
    discovery.use("acme")
    with pytest.raises(VendorLoadError, match=r"'acme'.*its device.*ZeroDivisionError"):
        discovery.device("cpu")


def test_a_vendor_of_another_device_does_not_get_the_host_s_kernels(plugins):
    plugins("acme", BARE.format(name="acme", priority=0).replace('"cpu"', '"npu"'))
    assert discovery.kernels_of(discovery.get("acme")) == {}


# --- end to end, in processes of their own since dispatch is global


def run_with_mini(code: str) -> str:
    path = f"import sys; sys.path.insert(0, {str(MINI)!r})\n"
    child = subprocess.run(
        [sys.executable, "-c", path + code], capture_output=True, text=True, timeout=500, check=False
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_a_plugin_answers_torch_ops_end_to_end():
    out = run_with_mini("""
import warnings, torch, dlinfer.ops
from dlinfer import vendor
from dlinfer.ops.core import fallback
x, w = torch.randn(3, 8), torch.randn(8)

def all_paths(x, w):
    by_python, by_torch = dlinfer.ops.rms_norm(x, w, 1e-6), torch.ops.dlinfer.rms_norm(x, w, 1e-6)
    torch.testing.assert_close(by_python, dlinfer.ops.rms_norm.reference(x, w, 1e-6))
    assert torch.equal(by_python, by_torch)

all_paths(x, w)
assert "mini_vendor.kernels" not in sys.modules  # installed, but nobody asked for it
vendor.use("mini")
all_paths(x, w)
from mini_vendor import kernels
assert kernels.calls == 2, kernels.calls
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    all_paths(x.half(), w.half())
    dlinfer.ops.add_rms_norm(x, x, w, 1e-6)
taken = {(kind.op, kind.vendor, kind.reason): count for kind, count in fallback.counts().items()}
assert taken[("rms_norm", "mini", "float16 is not served")] == 2, taken
assert ("add_rms_norm", "mini", "the vendor has no kernel for this op") in taken
assert all("mini" in str(warning.message) for warning in caught) and len(caught) == 2
vendor.use("cpu")
all_paths(x, w)
print(kernels.calls, vendor.vendor_name)
""")
    assert out.split() == ["2", "cpu"]


def test_the_first_op_call_from_many_threads():
    out = run_with_mini("""
import os, threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
os.environ["DLINFER_VENDOR"] = "mini"
import torch, dlinfer.ops
x, w, start = torch.randn(3, 8), torch.randn(8), threading.Barrier(16)

def first_call(_):
    start.wait()
    return torch.ops.dlinfer.rms_norm(x, w, 1e-6)

with ThreadPoolExecutor(16) as pool:
    results = list(pool.map(first_call, range(16)))
for result in results:
    torch.testing.assert_close(result, dlinfer.ops.rms_norm.reference(x, w, 1e-6))
from mini_vendor import kernels
print(kernels.calls)
""")
    assert out.split() == ["16"]


def test_an_engine_of_two_vendors_names_both(plugins):
    for name in ("acme", "beta"):
        plugins(name, healthy(name, "cpu", engines=("fast",)))
    with pytest.raises(
        VendorClashError, match="the graph engine 'fast' is claimed by both vendor 'acme' and vendor 'beta'"
    ):
        find_engine("fast", "cpu")


def test_a_vendor_whose_probe_raises_says_so_when_its_engine_is_wanted(plugins):
    plugins("acme", healthy("acme", "cpu", probe="1 / 0", engines=("fast",)))
    with pytest.raises(EngineUnavailableError, match="its probe failed with ZeroDivisionError"):
        find_engine("fast", "cpu")


def test_only_engines_that_can_run_here_are_offered(plugins):
    plugins(
        "acme",
        healthy("acme", "cpu", probe="Probe(False, 'no card', 'plug one in')", engines=("fast", "slow")),
    )
    with pytest.raises(EngineUnavailableError, match=r"no card.*inductor") as caught:
        find_engine("fast", "cpu")
    assert {"fast", "slow"}.isdisjoint(caught.value.fields["available"].split(", "))


def test_an_engine_that_cannot_be_loaded_names_its_vendor(plugins):
    plugins("acme", healthy("acme", "cpu", engines=("fast",)))  # and no load_engine
    with pytest.raises(VendorLoadError, match=r"'acme'.*its engine 'fast'"):
        find_engine("fast", "cpu")


def test_an_engine_of_another_interface_names_its_vendor(plugins):
    source = healthy("acme", "cpu", engines=("fast",))
    plugins("acme", source.replace("engines=", "load_engine=lambda name: object(), engines="))
    with pytest.raises(VendorLoadError, match=r"'acme'.*returned object, not a dlinfer.graph.engine.Engine"):
        find_engine("fast", "cpu")
