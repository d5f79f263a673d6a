"""Captured decoding steps on a simulated card: what is captured, what a capture forbids, planted faults.

A vendor's checks are a subclass of ``CapturedSteps``, with what is its own.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dlinfer import ops, settings
from dlinfer.framework.lmdeploy_ext.errors import CapturedStepError, NoDeviceGraphError
from dlinfer.framework.lmdeploy_ext.layers.attention import StepMetadata
from dlinfer.framework.lmdeploy_ext.running.capture.buffers import StepBuffers
from dlinfer.framework.lmdeploy_ext.running.capture.policy import PREFILL, CapturePolicy, compatible_size
from dlinfer.framework.lmdeploy_ext.running.capture.runner import CaptureRunner
from dlinfer.ops.core import fallback
from dlinfer.vendor.device import Device
from tests.vendor import simulated_graph

BLOCK, BLOCKS, HEADS, SIZE = 16, 8, 2, 64
STEPS = ([5, 20], [6, 21], [30], [31], [3, 9, 17], [4, 10, 18])


class OneLayer(torch.nn.Module):
    """A decoding step in small: an embedding, a norm, a write to the cache and attention over it."""

    def __init__(self, card: str) -> None:
        super().__init__()
        self.ctx_mgr: Any = None
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(32, HEADS * SIZE, generator=generator).half()
        self.embedding = torch.nn.Parameter(table.to(card), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.ones(HEADS * SIZE).half().to(card), requires_grad=False)
        self.asks_host = False

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, past_key_values: Any, attn_metadata: Any
    ) -> Tensor:
        meta, (keys, values) = attn_metadata, past_key_values[0]
        hidden = self.embedding[input_ids[0]] + position_ids[0].unsqueeze(-1).half() / 16
        if self.asks_host:
            hidden = hidden * float(hidden.sum().item() != 0)
        q = ops.rms_norm(hidden, self.norm, 1e-6).view(-1, HEADS, SIZE)
        ops.fill_kv_cache(q, q * 2, keys, values, meta.kv_start_indices)
        out = ops.paged_decode_attention(
            q, keys, values, meta.block_offsets, meta.block_size, meta.cu_seqlens_q_cpu[1:], meta.kv_seqlens_cpu,
            meta.max_kv_seq_len, HEADS, HEADS, softmax_scale=0.125,
        )  # fmt: skip
        return out.reshape(1, -1, HEADS * SIZE)


def _without(name: str) -> Any:
    def fill(self: StepBuffers, inputs: dict[str, Any], whole: Any = StepBuffers.fill) -> None:
        kept = getattr(self, name).clone()
        whole(self, inputs)
        getattr(self, name).copy_(kept)

    return fill


def _padded_with(name: str, value: int) -> Any:
    def fill(self: StepBuffers, inputs: dict[str, Any], whole: Any = StepBuffers.fill) -> None:
        whole(self, inputs)
        getattr(self, name)[inputs["input_ids"].shape[1] :].fill_(value)

    return fill


def with_lengths_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: attention in a graph is given lengths that lie on the host."""

    def inputs(self: StepBuffers, given: Any, whole: Any = StepBuffers.inputs) -> Any:
        found = whole(self, given)
        meta = dataclasses.replace(found["attn_metadata"], kv_seqlens_cpu=self.kv_seqlens.cpu())
        return found | {"attn_metadata": meta}

    monkeypatch.setattr(StepBuffers, "inputs", inputs)


class CapturedSteps:
    """name: torch's, of the card. device: the vendor's. shape: of a cache of keys or values."""

    name: ClassVar[str]
    device: ClassVar[type[Device]]
    shape: ClassVar[tuple[int, ...]]

    @pytest.fixture
    def runner(self) -> CaptureRunner:
        return self.build()

    def caches(self) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [[torch.randn(self.shape, generator=generator).half().to(self.name) for _ in range(2)]]

    def step(self, lengths: list[int], cached: Any, first: int = 0, decoding: bool = True) -> dict[str, Any]:
        """Keywords of a step of sequences of these lengths, of which each has two blocks from ``first`` on."""
        count = len(lengths)
        table = torch.arange(first, first + 2 * count).view(count, 2) % BLOCKS
        length = torch.tensor(lengths)
        slots = table[torch.arange(count), (length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK
        ends = torch.arange(count + 1, dtype=torch.int32)
        meta = StepMetadata(
            is_decoding=decoding,
            block_offsets=table.int().to(self.name),
            q_start_loc=ends[:-1].to(self.name),
            q_seqlens=torch.ones(count, dtype=torch.int64).to(self.name),
            kv_seqlens=length.to(self.name),
            cu_seqlens_q=ends.to(self.name),
            cu_seqlens_q_cpu=ends,
            kv_seqlens_cpu=length,
            kv_start_indices=slots.to(self.name),
            block_size=BLOCK,
            max_kv_seq_len=max(lengths),
        )
        return {
            "input_ids": (length % 32).view(1, -1).to(self.name),
            "position_ids": (length - 1).view(1, -1).to(self.name),
            "past_key_values": cached,
            "attn_metadata": meta,
            "inputs_embeds": None,
        }

    def build(self, **policy: Any) -> CaptureRunner:
        cache_config = SimpleNamespace(max_batches=8)
        model = OneLayer(self.name)
        run = CaptureRunner(
            self.device(), model, None, cache_config, None, None, policy=CapturePolicy(largest=8, **policy)
        )
        forward = model.forward
        model.forward = lambda inputs_embeds=None, **kwargs: forward(**kwargs)  # type: ignore[method-assign]
        return run

    def differs(self, runner: CaptureRunner, steps: Any = STEPS, **more: Any) -> bool:
        """Whether any step gives another result, or leaves another cache, than the model alone."""
        ours, alone = self.caches(), self.caches()
        for number, lengths in enumerate(steps):
            mine = runner(**self.step(lengths, ours, first=number, **more)).cpu()
            want = runner.model(**self.step(lengths, alone, first=number, **more)).cpu()
            same = mine.shape == want.shape and torch.equal(mine, want)
            if not same or not all(
                torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours[0], alone[0], strict=True)
            ):
                return True
        return False

    def test_replays_are_the_model(self, runner):
        assert not self.differs(runner)
        assert runner.counts.captures == {1: 1, 2: 1, 4: 1} and runner.counts.replays == {1: 1, 2: 1, 4: 1}
        assert not runner.counts.eager and not runner.counts.dropped

    def test_a_padding_row_reads_and_writes_nothing(self):
        buffers, cached = (
            StepBuffers(4, BLOCKS, torch.device(self.name), self.device.padding_length),
            self.caches(),
        )
        buffers.fill(self.step([20, 21, 22, 23], cached))
        buffers.fill(self.step([5, 6], cached, first=3))
        assert buffers.kv_seqlens.tolist() == [5, 6, *[self.device.padding_length] * 2]
        assert buffers.slots.tolist()[2:] == [-1, -1] and min(buffers.slots.tolist()[:2]) >= 0
        assert buffers.block_offsets[2:].eq(0).all() and buffers.block_offsets[:2, 2:].eq(0).all()
        assert buffers.block_offsets[:2, :2].tolist() == [[3, 4], [5, 6]]

    def test_what_is_never_captured(self, runner):
        cached = self.caches()
        given = self.step([5, 6], cached)
        policy = runner.policy
        assert policy.why_not(given) is None
        assert policy.why_not(self.step([5, 6], cached, decoding=False)) == PREFILL
        assert "inputs_embeds" in (policy.why_not(given | {"inputs_embeds": given["input_ids"]}) or "")
        adapted = dataclasses.replace(policy, adapters=True)
        assert "LoRA" in (adapted.why_not(given) or "")
        quantised = dataclasses.replace(given["attn_metadata"], quant_policy=8)
        assert "quantised" in (policy.why_not(given | {"attn_metadata": quantised}) or "")
        assert "more than 8" in (policy.why_not(self.step([1] * 9, cached)) or "")
        assert [compatible_size(n) for n in (1, 3, 9, 17, 257)] == [1, 4, 16, 32, 512] and policy.size(7) == 8

    def test_limits_run_eagerly_and_say_so(self):
        few = self.build(most_graphs=1)
        assert not self.differs(few)
        assert few.counts.captures == {2: 1} and few.counts.eager == {"the limit of 1 graphs is reached": 4}
        full = self.build(least_free=2.0)
        assert not self.differs(full)
        assert not full.counts.captures and sum(full.counts.eager.values()) == len(STEPS)

    def test_caches_and_weights_that_move_drop_graphs(self, runner):
        self.differs(runner, [[5], [6]])
        with torch.no_grad():
            runner.model.embedding.mul_(2)
        assert not self.differs(runner, [[5], [6]])  # of new caches as well
        ours = self.caches()
        runner(**self.step([5], ours))
        with torch.no_grad():
            runner.model.embedding.mul_(2)
        runner(**self.step([6], ours))
        assert runner.counts.dropped["weights were updated"] == 1
        assert runner.counts.dropped["caches were reallocated"] == 2
        runner.reset()
        assert runner.counts.dropped["LMDeploy reset its graphs"] == 1

    def test_a_host_read_is_refused_by_name(self, runner):
        runner.model.asks_host = True
        with (
            settings.override(fallback="error"),
            pytest.raises(CapturedStepError, match="_local_scalar_dense"),
        ):
            runner(**self.step([5], self.caches()))
        assert not simulated_graph.capturing()

    def test_a_size_that_cannot_be_captured_runs_eagerly_and_is_counted(self, runner):
        runner.model.asks_host = True
        fallback.reset()
        with (
            settings.override(fallback="warn"),
            pytest.warns(fallback.FallbackWarning, match="runs eagerly") as said,
        ):
            assert not self.differs(runner)
        assert len(said) == 3 and sum(fallback.counts().values()) == 3  # one a size: 2, 1 and 4 rows
        assert sum(runner.counts.eager.values()) == len(STEPS)
        assert not runner.counts.captures and not runner.counts.replays and not simulated_graph.capturing()
        runner.model.asks_host = False
        runner.reset()
        with settings.override(fallback="error"):
            assert not self.differs(runner)
        assert runner.counts.captures and runner.counts.replays

    def test_a_device_without_graphs_is_refused(self, monkeypatch):
        monkeypatch.setattr(self.device, "graph_class", "NoGraph")
        with pytest.raises(NoDeviceGraphError, match="NoGraph"):
            self.build()

    def test_a_capture_forbids(self):
        x = torch.ones(4).to(self.name)
        for forbidden in (
            lambda: x.sum().item(),
            x.cpu,
            x.nonzero,
            lambda: x[x > 0],
            lambda: torch.tensor([1.0, 2.0], device=self.name),
            lambda: x.copy_(torch.zeros(4)),
            lambda: torch.equal(x, x),
            lambda: torch.get_device_module(self.name).synchronize(),
            lambda: simulated_graph.Graph().capture_begin(),
        ):
            graph = simulated_graph.Graph()
            graph.capture_begin()
            try:
                with pytest.raises(simulated_graph.CaptureFault):
                    forbidden()
            finally:
                graph.capture_end()

    def test_a_replay_needs_its_memory(self):
        x, graph = torch.ones(4).to(self.name), simulated_graph.Graph()
        with pytest.raises(simulated_graph.CaptureFault, match="not captured"):
            graph.replay()
        graph.capture_begin()
        y = x * 2
        graph.capture_end()
        assert y.isnan().all()
        graph.replay()
        x.fill_(3)
        assert y.tolist() == [2] * 4
        graph.replay()
        assert y.tolist() == [6] * 4
        del x
        with pytest.raises(simulated_graph.CaptureFault, match="freed"):
            graph.replay()

    @pytest.mark.parametrize("name", ["input_ids", "position_ids", "kv_seqlens", "block_offsets", "slots"])
    def test_an_input_that_is_not_copied_is_seen(self, runner, monkeypatch, name):
        monkeypatch.setattr(StepBuffers, "fill", _without(name))
        assert self.differs(runner)

    def test_padding_that_writes_is_seen(self, runner, monkeypatch):
        monkeypatch.setattr(StepBuffers, "fill", _padded_with("slots", 127))
        assert self.differs(runner)

    def test_one_graph_for_all_sizes_is_seen(self, runner, monkeypatch):
        monkeypatch.setattr(CapturePolicy, "size", lambda self, batch: 2)
        with pytest.raises(RuntimeError):
            self.differs(runner)

    def test_a_replay_after_caches_moved_is_seen(self, runner, monkeypatch):
        monkeypatch.setattr(CaptureRunner, "_drop_stale", lambda self, caches: None)
        runner(**self.step([5], self.caches()))
        with pytest.raises(simulated_graph.CaptureFault, match="freed"):
            runner(**self.step([6], self.caches()))
