"""Decoding steps in NPUGraphs, on the strict stand-in of one: what is captured, what a capture forbids, faults."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer import settings
from dlinfer.errors import KernelDeclined
from dlinfer.framework.lmdeploy_ext.errors import CapturedStepError, NoDeviceGraphError
from dlinfer.framework.lmdeploy_ext.running.capture.runner import CaptureRunner
from dlinfer.ops.core import fallback
from dlinfer.vendor.ascend import captured, slots
from dlinfer.vendor.ascend.captured import CapturedLengths
from dlinfer.vendor.ascend.device import AscendDevice
from tests.vendor import simulated_graph
from tests.vendor.ascend.capture.steps import OneLayer, build, caches, differs, step
from tests.vendor.ascend.simulated_npu import graphs, install

SIZES = {1: 1, 2: 1, 4: 1}


@pytest.fixture
def runner() -> Iterator[CaptureRunner]:
    yield build()


@pytest.mark.parametrize(
    "model", [{}, {"latent": True}, {"window": 4}, {"window": 150}, {"window": 500}], ids=str
)
def test_replays_are_the_model(model):
    """Sequences grow across blocks, and three rows are padded to four."""
    runner = build(OneLayer(**model))
    with settings.override(fallback="error"):
        assert not differs(runner)
    assert runner.counts.captures == SIZES and runner.counts.replays == {2: 2, 1: 1, 4: 1}
    assert not runner.counts.eager and not runner.counts.dropped


def test_lengths_below_and_above_those_of_the_capture(runner):
    """A workspace of the capture's lengths would be too small."""
    with settings.override(fallback="error"):
        assert not differs(runner, [[3], [250], [1], [128]])
    assert runner.counts.replays == {1: 3}


def test_a_window_has_a_mask_of_its_own_blocks_only():
    """Tables of a graph have room for all blocks of a cache."""
    runner: Any = build(OneLayer(window=4))
    runner(**step([5, 9], caches(runner.model)))
    for task in runner._captured[2].numbers._tasks:
        assert tuple(task.arguments["atten_mask"].shape) == (2, 1, 1, 256)
        assert tuple(task.arguments["block_table"].shape) == (2, 2)


@pytest.mark.parametrize("fault", ["first", "mask"])
def test_a_window_that_does_not_move_is_seen(monkeypatch, fault):
    once = CapturedLengths.once

    def stays(self: Any, key: Any, make: Any) -> Tensor:
        made = once(self, key, make)
        return torch.zeros_like(made) if key[0] == fault else made

    monkeypatch.setattr(CapturedLengths, "once", stays)
    assert differs(build(OneLayer(window=4)))


def test_the_vendor_is_asked_once_a_capture(runner):
    cached = caches(runner.model)
    runner(**step([5, 9], cached))
    install.calls.clear()
    runner(**step([6, 10], cached))
    replayed = dict(install.calls)
    assert replayed["npu_fused_infer_attention_score"] == 2  # one a layer, in the replay; none by an update
    assert "npu_scatter_pa_kv_cache" in replayed


def test_prompts_run_eagerly(runner):
    assert "prefill" in (runner.policy.why_not(step([5], caches(runner.model), decoding=False)) or "")


def test_updates_go_on_another_stream_than_the_replay(runner):
    """Streams come from a pool, which may give the replay's own."""
    npu, cached = torch.get_device_module("npu"), caches(runner.model)
    runner(**step([5], cached))
    numbers: Any = runner._captured[1].numbers
    with npu.stream(npu.Stream()):
        numbers._updates = npu.current_stream()
        runner(**step([6], cached))
        assert numbers._updates is not npu.current_stream()
    assert runner.counts.replays == {1: 1}


def test_a_host_read_is_refused_by_name(runner):
    runner.model.asks_host = True
    with settings.override(fallback="error"), pytest.raises(CapturedStepError, match="_local_scalar_dense"):
        runner(**step([5], caches(runner.model)))
    assert not simulated_graph.capturing()


def test_a_size_that_cannot_be_captured_runs_eagerly_and_is_counted(runner):
    runner.model.asks_host = True
    fallback.reset()
    with (
        settings.override(fallback="warn"),
        pytest.warns(fallback.FallbackWarning, match="runs eagerly") as said,
    ):
        assert not differs(runner)
    assert len(said) == 3 and sum(runner.counts.eager.values()) == 7
    assert not runner.counts.replays


def test_a_card_without_the_fused_attention_runs_eagerly_and_says_which_op(runner):
    from dlinfer.vendor.ascend import chips

    install.chip.update(name="Ascend310P3", version=200)
    chips.current.cache_clear()
    with settings.override(fallback="allow"):
        runner(**step([5], caches(runner.model)))
    (reason,) = runner.counts.eager
    assert "paged_decode_attention" in reason and "waits for the host" in reason


def test_a_cache_of_few_slots_is_declined():
    k = torch.zeros(3, 2, 64).half().to("npu")
    cache, given = torch.zeros(1, 4, 2, 64).half().to("npu"), torch.tensor([0, 1, -1]).to("npu")
    with pytest.raises(
        KernelDeclined, match="3 rows of a captured graph need twice as many slots, but the cache has 4"
    ):
        slots._captured(captured.CapturedLengths(), k, k, cache, cache, given)


def test_slots_of_padding_are_no_other_row_s():
    given = torch.tensor([0, 5, 2, 7, -1, -1, -1, -1]).to("npu")
    found = captured._distinct(given).tolist()
    assert found[:4] == [0, 5, 2, 7] and len(set(found)) == 8 and 0 <= min(found) <= max(found) < 16


def test_a_device_without_graphs_is_refused(monkeypatch):
    monkeypatch.setattr(AscendDevice, "graph_class", "NoGraph")
    with pytest.raises(NoDeviceGraphError, match="NoGraph"):
        build()


# --- planted faults


def _plant(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any) -> None:
    monkeypatch.setattr(f"dlinfer.vendor.ascend.captured.{name}", fault)


def test_a_forgotten_update_is_seen(runner, monkeypatch):
    _plant(monkeypatch, "CapturedLengths.update", lambda self, kv_seqlens: None)
    with pytest.raises(simulated_graph.CaptureFault, match="waits for an ExternalEvent for ever"):
        differs(runner)


def test_stale_lengths_are_seen(runner, monkeypatch):
    """Events are recorded, and tasks are told nothing new."""
    whole = CapturedLengths.update
    _plant(monkeypatch, "CapturedLengths.update", lambda self, _: whole(self, self._lengths))
    assert differs(runner)


def test_events_without_updates_are_seen(runner, monkeypatch):
    def update(self: Any, kv_seqlens: Any) -> None:
        for task in self._tasks:
            task.event.record()

    _plant(monkeypatch, "CapturedLengths.update", update)
    assert differs(runner)


def test_an_event_that_is_not_recorded_is_seen(runner, monkeypatch):
    """Of the second layer."""
    run = CapturedLengths.run

    def forgets(self: Any, *args: Any, **kwargs: Any) -> None:
        run(self, *args, **kwargs)
        if len(self._tasks) == 2:
            nobodys = torch.get_device_module("npu").ExternalEvent()
            self._tasks[1] = dataclasses.replace(self._tasks[1], event=nobodys)

    _plant(monkeypatch, "CapturedLengths.run", forgets)
    with pytest.raises(simulated_graph.CaptureFault, match="for ever"):
        differs(runner)


def test_an_update_that_may_overtake_a_replay_is_seen(runner, monkeypatch):
    update = CapturedLengths.update

    def hurries(self: Any, kv_seqlens: Any) -> None:
        self._replayed = torch.get_device_module("npu").Event()
        update(self, kv_seqlens)

    _plant(monkeypatch, "CapturedLengths.update", hurries)
    with pytest.raises(simulated_graph.CaptureFault, match="overtake"):
        differs(runner)


def test_an_event_that_is_never_reset_is_seen(runner, monkeypatch):
    """The replay after the next does not stand, and an update comes too late for it."""
    monkeypatch.setattr(graphs.ExternalEvent, "reset", lambda self, stream=None: None)
    with pytest.raises(simulated_graph.CaptureFault, match="overtake"):
        differs(runner, [[5], [6], [7], [8]])


def test_a_call_that_is_no_task_is_seen(runner, monkeypatch):
    """As a kernel would capture it that knows nothing of lengths in graphs."""

    def run(self: Any, op: Any, numbers: Any, **arguments: Any) -> None:
        op(**arguments, **numbers(self._lengths))

    _plant(monkeypatch, "CapturedLengths.run", run)
    assert differs(runner)


def test_results_that_are_not_given_are_refused(runner, monkeypatch):
    def run(self: Any, op: Any, numbers: Any, out: Any, workspace: Tensor, **arguments: Any) -> None:
        npu = self._npu
        npu.graph_task_group_begin(npu.current_stream())
        torch.ops.npu.npu_fused_infer_attention_score(**arguments, **numbers(self._lengths))

    _plant(monkeypatch, "CapturedLengths.run", run)
    with (
        settings.override(fallback="error"),
        pytest.raises(CapturedStepError, match="results of a task group"),
    ):
        runner(**step([5], caches(runner.model)))


def test_a_workspace_for_the_captures_lengths_is_seen(runner, monkeypatch):
    run = CapturedLengths.run

    def small(self: Any, *args: Any, workspace: Tensor, **kwargs: Any) -> None:
        run(self, *args, workspace=workspace[:4].clone(), **kwargs)

    _plant(monkeypatch, "CapturedLengths.run", small)
    with pytest.raises(RuntimeError, match="workspace: "):
        differs(runner, [[5], [250]])


SIZE, RESULTS = (
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_infer_output",
)
WRONG_CALLS: list[tuple[str, str, Any]] = [
    (
        SIZE,
        "another name",
        lambda kw: {"softmax_scale" if key == "scale" else key: x for key, x in kw.items()},
    ),
    (SIZE, "no pages", lambda kw: kw | {"block_table": None}),
    (SIZE, "another page", lambda kw: kw | {"block_size": 64}),
    (SIZE, "another layout", lambda kw: kw | {"input_layout": "BSH"}),
    (RESULTS, "another name", lambda kw: kw | {"num_query_heads": 2}),
    (RESULTS, "another layout", lambda kw: kw | {"input_layout": "TND"}),
    (RESULTS, "other heads", lambda kw: kw | {"num_heads": 4}),
    (RESULTS, "other heads of keys", lambda kw: kw | {"num_key_value_heads": 1}),
    (RESULTS, "no pages", lambda kw: kw | {"block_table": None}),
    ("out", "results the other way round", lambda kw: kw | {"out": kw["out"][::-1]}),
    ("out", "one result", lambda kw: kw | {"out": kw["out"][:1]}),
    ("out", "results of other sizes", lambda kw: kw | {"out": [kw["out"][0].squeeze(1), kw["out"][1]]}),
    ("out", "no workspace", lambda kw: kw | {"workspace": None}),
    ("out", "another name", lambda kw: {"q" if key == "query" else key: x for key, x in kw.items()}),
    ("out", "no page's size", lambda kw: {key: x for key, x in kw.items() if key != "block_size"}),
]


@pytest.mark.parametrize(
    ("op", "fault", "change"), WRONG_CALLS, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_wrong_call_of_a_capture_is_refused(runner, monkeypatch, op, fault, change):
    """By torch where the schema tells, else by the documents' rules."""
    if op == "out":
        run = CapturedLengths.run
        _plant(monkeypatch, "CapturedLengths.run", lambda self, *args, **kw: run(self, *args, **change(kw)))
    else:
        real = getattr(torch.ops.npu, op)
        monkeypatch.setitem(torch.ops.npu.__dict__, op, lambda *args, **kw: real(*args, **change(kw)))
    with settings.override(fallback="error"), pytest.raises(CapturedStepError):
        runner(**step([5, 9], caches(runner.model)))


def test_padding_that_is_told_its_length_is_refused(runner, monkeypatch):
    _plant(monkeypatch, "_served", list)
    with (
        settings.override(fallback="error"),
        pytest.raises(RuntimeError, match="actual_seq_lengths_kv: not 0"),
    ):
        differs(runner)


def _of_padding(runner: Any) -> tuple[Tensor, Tensor]:
    """What a replay gives for a padding row, and what the layers start from."""
    cached = caches(runner.model)
    runner(**step([3, 9, 255], cached))
    found: Any = runner._captured[4]
    found.graph.replay()
    found.numbers.update([3, 9, 255, 0])
    ids, places = found.buffers.input_ids[0], found.buffers.position_ids[0]
    alone = runner.model.embedding[ids] + places.unsqueeze(-1).half() / 64
    return found.result[0, 3].cpu(), alone[3].cpu()


def test_padding_that_is_not_dropped_is_seen(monkeypatch):
    """No row that is compared has it: what it would break is the op's own contract."""
    monkeypatch.setattr(CapturedLengths, "padding", lambda self, kv_seqlens: kv_seqlens < 0)
    result, alone = _of_padding(build())
    assert not torch.equal(result, alone)


def test_padding_gives_nothing(runner):
    result, alone = _of_padding(runner)
    assert torch.equal(result, alone)


@pytest.mark.parametrize("fault", ["a slot of a row", "one slot for all", "not what stands there"])
def test_padding_that_writes_is_seen(runner, monkeypatch, fault):
    if fault == "a slot of a row":
        _plant(monkeypatch, "_distinct", lambda slots: torch.where(slots < 0, slots[0], slots))
    elif fault == "one slot for all":
        _plant(monkeypatch, "_distinct", lambda slots: slots.masked_fill(slots < 0, 0))
    else:
        monkeypatch.setattr(CapturedLengths, "unwritten", lambda self, slots: slots < -1)
    assert differs(runner, [[3, 9, 255, 7, 8], [4, 10, 256, 8, 9]])


def test_a_capture_that_looks_at_slots_is_refused(runner, monkeypatch):
    def looks(tasks: Any, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Any:
        assert bool((slots >= 0).all())
        return k, v, slots

    monkeypatch.setattr("dlinfer.vendor.ascend.slots._captured", looks)
    with (
        settings.override(fallback="error"),
        pytest.raises(CapturedStepError, match=r"fill_kv_cache.*waits for the host"),
    ):
        runner(**step([5], caches(runner.model)))
