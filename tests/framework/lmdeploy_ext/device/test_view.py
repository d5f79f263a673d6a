"""The device view: LMDeploy's own modules see "cuda" as the CPU, everybody else sees torch as it is."""

import subprocess
import sys
import textwrap

import pytest
import torch

from dlinfer.framework.lmdeploy_ext.device.view import TorchView
from dlinfer.vendor import discovery
from dlinfer.vendor.streams import HostEvent, HostStream


@pytest.fixture
def view():
    return TorchView("cpu", discovery.device("cpu"))


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1), None, "cpu"])
def test_factories_place_cuda_tensors_on_the_device(view, device):
    for made in (
        view.zeros(2, device=device),
        view.full((2,), 1, device=device),
        view.tensor([1, 2], device=device),
        view.randint(0, 3, (2,), device=device),
        view.empty_like(torch.ones(2), device=device),
    ):
        assert made.device.type == "cpu"


def test_other_devices_and_names_pass_through(view):
    assert view.zeros(2, device="meta").device.type == "meta"
    assert view.device("cuda") == torch.device("cpu") == view.device("cuda", 0)
    assert view.device("meta").type == "meta"
    assert isinstance(view.device("cuda"), view.device) and isinstance(torch.device("cpu"), view.device)
    assert not isinstance("cpu", view.device)
    assert view.float32 is torch.float32 and view.nn is torch.nn and view.Tensor is torch.Tensor


def test_streams_and_events_are_always_done(view):
    stream, event = view.cuda.Stream(), view.cuda.Event()
    assert isinstance(stream, HostStream) and isinstance(event, HostEvent)
    assert (
        stream is not view.cuda.current_stream() and view.cuda.current_stream() is view.cuda.current_stream()
    )
    with view.cuda.stream(stream):
        event.record(stream)
    stream.wait_event(event)
    stream.wait_stream(view.cuda.current_stream())
    view.cuda.synchronize()
    assert event.query() and stream.query() and stream.record_event(event) is event
    assert torch.zeros(1, device=view.cuda.current_device()).device.type == "cpu"
    assert view.cuda.get_device_properties(0).total_memory > 1 << 20


SCRIPT = """
    import json
    import torch
    import torch._dynamo  # wraps torch.manual_seed by itself
    before = {name: getattr(torch, name) for name in dir(torch)}
    cuda_before = {name: getattr(torch.cuda, name, None) for name in dir(torch.cuda)}
    from lmdeploy import PytorchEngineConfig
    PytorchEngineConfig(device_type="cpu")
    from lmdeploy.pytorch.engine.model_agent import agent
    from lmdeploy.pytorch.models import llama
    import transformers.models.llama.modeling_llama as hf
    changed = [name for name, value in before.items() if getattr(torch, name) is not value]
    changed += ["cuda." + name for name, value in cuda_before.items() if getattr(torch.cuda, name, None) is not value]
    print(json.dumps({
        "changed": changed,
        "agent": agent.torch is torch,
        "model": llama.torch is torch,
        "transformers": hf.torch is torch,
        "to": torch.Tensor.to.__qualname__,
    }))
"""


@pytest.mark.slow
@pytest.mark.full
def test_only_lmdeploys_own_modules_are_touched():
    import json

    script = textwrap.dedent(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=True
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["changed"] == []
    assert seen["agent"] is False
    assert seen["model"] is True and seen["transformers"] is True
