"""The simulated MLU's graph: it records the vendor's functions, replays them on the same memory, and is strict."""

import pytest
import torch

from tests.vendor import simulated_graph
from tests.vendor.camb.simulated_mlu.install import NAME, calls


def test_the_vendor_s_functions_are_replayed_on_what_lies_in_their_inputs():
    import torch_mlu_ops as tmo  # pyright: ignore[reportMissingImports]

    x, graph = torch.ones(2, 8, dtype=torch.float16).to(NAME), torch.get_device_module(NAME).MLUGraph()
    graph.capture_begin()
    out = tmo.active(x, "silu", True)
    graph.capture_end()
    assert out.isnan().all()
    before = calls["active"]
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(out.cpu(), tmo.active(x, "silu", True).cpu())
    assert calls["active"] == before + 4
    del x
    with pytest.raises(simulated_graph.CaptureFault, match=r"active.*freed"):
        graph.replay()


def test_a_capture_forbids():
    mlu, x = torch.get_device_module(NAME), torch.ones(4).to(NAME)
    for forbidden in (x.tolist, x.cpu, x.sum().item, mlu.synchronize, lambda: torch.tensor([1], device=NAME)):
        graph = mlu.MLUGraph()
        graph.capture_begin()
        try:
            assert mlu.is_current_stream_capturing()
            with pytest.raises(simulated_graph.CaptureFault):
                forbidden()
        finally:
            graph.capture_end()
        assert not mlu.is_current_stream_capturing()


def test_what_documents_do_not_admit_is_refused_in_a_capture_too():
    import torch_mlu_ops as tmo  # pyright: ignore[reportMissingImports]

    graph = torch.get_device_module(NAME).MLUGraph()
    graph.capture_begin()
    try:
        with pytest.raises(TypeError):
            tmo.active(torch.ones(2, 8, device=NAME), "silu", "gated")
    finally:
        graph.capture_end()
