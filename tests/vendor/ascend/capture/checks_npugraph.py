"""What the stand-in of an NPUGraph forbids, and that a task keeps its lengths until it is told others."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vendor.ascend.simulated_npu import graphs, streams
from tests.vendor.simulated_graph import CaptureFault

LENGTHS = [3, 20]
ARGUMENTS: dict[str, Any] = {
    "num_heads": 2,
    "num_key_value_heads": 2,
    "input_layout": "BSND",
    "block_size": 16,
}


@pytest.fixture
def npu() -> Any:
    return torch.get_device_module("npu")


class Captured:
    """One attention of two sequences, captured as a task group behind an event."""

    def __init__(self, npu: Any, waits: bool = True) -> None:
        self.npu, generator = npu, torch.Generator().manual_seed(0)
        self.q = torch.randn(2, 1, 2, 16, generator=generator).half().to("npu")
        self.k, self.v = (torch.randn(4, 16, 32, generator=generator).half().to("npu") for _ in range(2))
        self.table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).to("npu")
        self.graph, self.event, self.inside = npu.NPUGraph(), npu.ExternalEvent(), npu.Stream()
        self.out = torch.zeros(2, 1, 2, 16).half().to("npu"), torch.zeros(1).to("npu")
        self.workspace = torch.zeros(4).half().to("npu")
        self.updates = npu.Stream()
        with npu.stream(self.inside):
            self.graph.capture_begin()
            if waits:
                self.event.wait(self.inside)
                self.event.reset(self.inside)
            npu.graph_task_group_begin(self.inside)
            self.call(LENGTHS)
            self.handle = npu.graph_task_group_end(self.inside)
            self.graph.capture_end()

    def call(self, lengths: list[int], **other: Any) -> None:
        given: dict[str, Any] = {
            "workspace": self.workspace,
            "out": list(self.out),
            "block_table": self.table,
        }
        torch.ops.npu.npu_fused_infer_attention_score.out(
            self.q, self.k, self.v, actual_seq_lengths_kv=lengths, **ARGUMENTS, **given | other
        )

    def update(self, lengths: list[int], handle: Any = None, **other: Any) -> None:
        with self.npu.stream(self.updates):
            self.npu.graph_task_update_begin(self.updates, handle or self.handle)
            self.call(lengths, **other)
            self.npu.graph_task_update_end(self.updates)

    def expected(self, lengths: list[int]) -> Tensor:
        found, _ = torch.ops.npu.npu_fused_infer_attention_score(
            self.q, self.k, self.v, actual_seq_lengths_kv=lengths, block_table=self.table, **ARGUMENTS
        )
        return found.cpu()


def test_a_task_keeps_its_lengths_until_it_is_told_others(npu):
    one = Captured(npu, waits=False)
    one.graph.replay()
    assert torch.equal(one.out[0].cpu(), one.expected(LENGTHS))
    npu.synchronize()
    one.update([32, 1])
    one.graph.replay()
    assert torch.equal(one.out[0].cpu(), one.expected([32, 1]))
    assert not torch.equal(one.expected([32, 1]), one.expected(LENGTHS))


def test_lengths_that_are_changed_in_place_are_not_told(npu):
    lengths = list(LENGTHS)
    one = Captured(npu, waits=False)
    one.update(lengths)
    lengths[:] = [1, 1]
    one.graph.replay()
    assert torch.equal(one.out[0].cpu(), one.expected(LENGTHS))


@pytest.mark.parametrize("before", [True, False], ids=["updated before the replay", "updated after it"])
def test_a_replay_stands_until_the_event_is_recorded(npu, before):
    one = Captured(npu)

    def update() -> None:
        one.update([32, 1])
        one.event.record(one.updates)

    if before:
        update()
    one.graph.replay()
    if not before:
        update()
    assert torch.equal(one.out[0].cpu(), one.expected([32, 1]))
    assert not one.event.recorded


@pytest.mark.parametrize("what", ["read", "op", "synchronize", "replay"])
def test_work_behind_a_replay_that_stands_is_refused(npu, what):
    one = Captured(npu)
    one.graph.replay()
    work = {
        "read": one.out[0].cpu,
        "op": lambda: one.q * 2,
        "synchronize": npu.synchronize,
        "replay": one.graph.replay,
    }[what]
    with pytest.raises(CaptureFault, match="for ever"):
        work()
    assert one.expected(LENGTHS).isfinite().all()  # and all goes on afterwards


def test_updates_are_refused(npu):
    one, other = Captured(npu), Captured(npu)
    begin, end = npu.graph_task_update_begin, npu.graph_task_update_end
    with pytest.raises(CaptureFault, match="not begun"):
        end(one.updates)
    with pytest.raises(CaptureFault, match="stream of their own"):
        begin(streams.DEFAULT, one.handle)
    with pytest.raises(CaptureFault, match="without a call of each task"), npu.stream(one.updates):
        begin(one.updates, one.handle)
        end(one.updates)
    with pytest.raises(CaptureFault, match="changes lengths alone"):
        one.update(LENGTHS, other.handle)  # of another graph
    graphs.forget()
    with pytest.raises(CaptureFault, match="3 lengths for a task of 2"):
        one.update([1, 2, 3])
    graphs.forget()
    with pytest.raises(CaptureFault, match="scale is another"):
        one.update(LENGTHS, scale=2.0)
    graphs.forget()
    with pytest.raises(CaptureFault, match="block_table is another"):
        one.update(LENGTHS, block_table=one.table.clone())
    graphs.forget()
    with pytest.raises(CaptureFault, match="within another"):
        begin(one.updates, one.handle)
        begin(one.updates, one.handle)
    graphs.forget()
    with pytest.raises(CaptureFault, match="before its update has ended"):
        begin(one.updates, one.handle)
        one.event.record(one.updates)
    graphs.forget()
    with pytest.raises(CaptureFault, match="no further task"), npu.stream(one.updates):
        begin(one.updates, one.handle)
        one.call(LENGTHS)
        one.call(LENGTHS)
    graphs.forget()
    with (
        pytest.raises(CaptureFault, match=r"npu_rms_norm updates a task of .*fused"),
        npu.stream(one.updates),
    ):
        begin(one.updates, one.handle)
        torch.ops.npu.npu_rms_norm(one.q, one.q[0, 0, 0], 1e-6)
    graphs.forget()
    one.graph.reset()
    with pytest.raises(CaptureFault, match="was reset"):
        begin(one.updates, one.handle)


def test_a_call_outside_of_an_update_tells_nothing(npu):
    """Neither before its begin, nor on another stream than it was begun on: it is computed."""
    one = Captured(npu, waits=False)
    one.call([32, 1])
    one.graph.replay()
    assert torch.equal(one.out[0].cpu(), one.expected(LENGTHS))
    npu.synchronize()
    npu.graph_task_update_begin(one.updates, one.handle)
    one.call([32, 1])
    with pytest.raises(CaptureFault, match="without a call"):
        npu.graph_task_update_end(one.updates)


def test_an_update_waits_for_the_replay_before(npu):
    one = Captured(npu, waits=False)
    one.graph.replay()
    with pytest.raises(CaptureFault, match="overtake"):
        one.update([32, 1])
    done = npu.Event()
    done.record()
    one.updates.wait_event(done)
    one.update([32, 1])


def test_captures_are_refused(npu):
    begin, end, x = npu.graph_task_group_begin, npu.graph_task_group_end, torch.ones(2).to("npu")
    with pytest.raises(CaptureFault, match="than the default one"):
        npu.NPUGraph().capture_begin()
    with pytest.raises(CaptureFault, match="outside of a capture"):
        begin(streams.DEFAULT)
    with pytest.raises(CaptureFault, match="not begun"):
        end(streams.DEFAULT)
    with pytest.raises(CaptureFault, match="nobody has recorded"):
        npu.ExternalEvent().wait()

    def within(match: str, *calls: Any, ends: str = "") -> None:
        inside, graph = npu.Stream(), npu.NPUGraph()
        with npu.stream(inside):
            graph.capture_begin()
            try:
                for call in calls[:-1]:
                    call(inside)
                with pytest.raises(CaptureFault, match=match):
                    calls[-1](inside)
            finally:
                if ends:
                    with pytest.raises(CaptureFault, match=ends):
                        graph.capture_end()
                else:
                    graph.capture_end()

    group = "ends within a task group"
    within("within another", begin, begin, ends=group)
    within("without a task", begin, end, ends=group)
    within("the vendor's own op", begin, lambda stream: x * 2, ends=group)
    within("another stream", lambda stream: begin(npu.Stream()))
    within("another stream", lambda stream: npu.ExternalEvent().wait(npu.Stream()))
    within("outside of what waits", lambda stream: npu.ExternalEvent().record(stream))
    within("not permitted", lambda stream: x.cpu())
    within("not permitted", lambda stream: npu.synchronize())
    within("not permitted", lambda stream: stream.synchronize())


def test_lengths_of_the_host_are_those_of_the_capture(npu):
    """A tensor of the host as well, which the latent attention takes: it is read once."""
    one, lengths = Captured(npu, waits=False), torch.tensor([3], dtype=torch.int32)
    q, cache = torch.ones(1, 2, 576).half().to("npu"), torch.randn(4, 16, 1, 576).half().to("npu")
    graph, outs = npu.NPUGraph(), [torch.zeros(1, 2, 512).half().to("npu") for _ in range(2)]
    table = torch.zeros(1, 1, dtype=torch.int32).to("npu")

    def attend(given: Tensor, out: Tensor) -> None:
        torch.ops.atb._npu_paged_attention_mla(q, cache, 1, 2, 1.0, table, given, 512, out)

    with npu.stream(one.inside):
        graph.capture_begin()
        attend(lengths, outs[0])
        graph.capture_end()
    lengths.fill_(9)
    graph.replay()
    attend(torch.tensor([3], dtype=torch.int32), outs[1])
    assert torch.equal(outs[0].cpu(), outs[1].cpu())
