"""dlinfer's counters on their way to LMDeploy's page of metrics."""

import pickle

import torch
from lmdeploy.messages import ScheduleMetrics
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from dlinfer.framework.lmdeploy_ext.running import graph_runner, metrics
from dlinfer.framework.lmdeploy_ext.running.graph_runner import PhaseCounts, RunnerCounts
from dlinfer.ops.core import fallback
from dlinfer.settings import override


def test_counts_of_an_engine(monkeypatch):
    engine = RunnerCounts([PhaseCounts("prefill", "loaded", 0.1)], steps=5)
    monkeypatch.setattr(graph_runner, "counts", lambda: [engine])
    monkeypatch.setattr(metrics, "_warm", None)
    fallback.reset()
    with override(fallback="allow"):
        fallback.take("rms_norm", "cpu", "float64", (torch.ones(1),))
        fallback.take("rms_norm", "cpu", "three dimensions", ())
    first = metrics.collect()
    assert (first.phases, first.late, first.steps) == ({"loaded": 1}, 0, 5)
    assert first.fallbacks == {("rms_norm", "cpu"): 2}
    engine.phases += [PhaseCounts("decoding", "compiled", 9.0)]
    assert metrics.collect().late == 1
    fallback.reset()


def test_counts_travel_with_the_schedulers():
    schedule = ScheduleMetrics()
    schedule.dlinfer = metrics.EngineCounts(steps=3)  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(schedule)).dlinfer.steps == 3


def test_counts_as_prometheus_reads_them():
    counts = metrics.EngineCounts({("rms_norm", "cpu"): 2}, {"compiled": 3}, 1, 7, {"hit": 4})

    class Ours(Collector):
        def collect(self):
            return metrics.families(counts)

    registry = CollectorRegistry()
    registry.register(Ours())
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'dlinfer:fallbacks_total{op="rms_norm",vendor="cpu"} 2.0',
        'dlinfer:graphs_total{outcome="compiled"} 3.0',
        'dlinfer:cache_entries_total{outcome="hit"} 4.0',
        "dlinfer:late_compiles_total 1.0",
        "dlinfer:steps_total 7.0",
    ]
