"""Ray: what is asked of it for ranks on a host, and when LMDeploy starts ranks itself."""

import pytest
from lmdeploy.pytorch import envs

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.ranks import ray_cluster


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    monkeypatch.setattr(activation, "_active", "cpu")


def test_ranks_of_one_host_are_not_rays(monkeypatch):
    call = ray_cluster._executor_backend.build(lambda *args: "ray")
    assert call(2, 1, "cpu") == "mp"
    assert call(2, 1, "cuda") == "ray"
    monkeypatch.setattr(envs, "executor_backend", "ray")
    assert call(2, 1, "cpu") == "ray"


def test_ranks_take_cpus():
    call = ray_cluster._device_str.build(lambda device_type: "GPU")
    assert (call("cpu"), call(), call("cuda")) == ("CPU", "CPU", "GPU")


def test_the_variables_of_ranks(monkeypatch):
    monkeypatch.setenv("DLINFER_FALLBACK", "error")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("HOME_OF_OTHERS", "x")
    sent = ray_cluster._variables()
    assert sent["DLINFER_FALLBACK"] == "error" and sent["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "HOME_OF_OTHERS" not in sent
