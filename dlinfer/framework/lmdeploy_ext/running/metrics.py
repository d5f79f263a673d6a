"""Adds dlinfer's own counters to the page /metrics of LMDeploy's server.

The engine runs in another process than the server. The server requests the metrics of the engine's scheduler every ten
seconds, and the engine adds its counters to this answer.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import is_on
from dlinfer.framework.patching import Original, replaces


@dataclass
class EngineCounts:
    """The counts of one engine process.

    fallbacks: (op, vendor that did not take the call) -> number of calls.
    phases: outcome (``compiled``, ``loaded`` or ``eager``) -> number of phases.
    late: number of phases that were added after the warm-up, while a request waited.
    steps: number of forwards in graph mode.
    cache: outcome -> number of entries of the disk cache.
    """

    fallbacks: dict[tuple[str, str], int] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    late: int = 0
    steps: int = 0
    cache: dict[str, int] = field(default_factory=dict)


_warm: int | None = None
_latest = EngineCounts()
_registered = False


def collect() -> EngineCounts:
    """Return the counts of this process. Phases that are added after the first call count as late.

    The server's start makes the first call, after the warm-up.
    """
    from dlinfer.framework.lmdeploy_ext.running import graph_runner
    from dlinfer.graph.cache import disk
    from dlinfer.ops.core import fallback

    global _warm
    engines = graph_runner.counts()
    phases = Counter(phase.outcome for engine in engines for phase in engine.phases)
    if _warm is None:
        _warm = phases.total()
    fallbacks: Counter[tuple[str, str]] = Counter()
    for kind, count in fallback.counts().items():
        fallbacks[kind.op, kind.vendor] += count
    steps = sum(engine.steps for engine in engines)
    return EngineCounts(dict(fallbacks), dict(phases), max(0, phases.total() - _warm), steps, disk.counts())


@replaces(
    "lmdeploy.pytorch.engine.engine:Engine.get_schedule_metrics",
    why="reports only the scheduler's metrics, though no other message of the engine's process can carry dlinfer's "
    "counters",
    when=is_on,
    essential=False,
)
def _get_schedule_metrics(original: Original, self: Any) -> Any:
    metrics = original(self)
    metrics.dlinfer = collect()
    return metrics


@replaces(
    "lmdeploy.metrics.stats:SchedulerStats.update_from_schedule_metrics",
    why="ignores dlinfer's counters in the message of the engine's process",
    when=is_on,
    essential=False,
)
def _update_from_schedule_metrics(original: Original, self: Any, scheduled_metrics: Any) -> None:
    global _latest
    original(self, scheduled_metrics)
    _latest = getattr(scheduled_metrics, "dlinfer", _latest)
    _register()


def _register() -> None:
    global _registered
    if _registered:
        return
    from prometheus_client import REGISTRY
    from prometheus_client.registry import Collector

    class OfDlinfer(Collector):
        def collect(self) -> Iterator[Any]:
            return families(_latest)

    REGISTRY.register(OfDlinfer())
    _registered = True


def families(counts: EngineCounts) -> Iterator[Any]:
    """Yield the counts as Prometheus metric families."""
    from prometheus_client.core import CounterMetricFamily

    calls = CounterMetricFamily(
        "dlinfer:fallbacks", "Calls that a vendor's kernel or engine did not take.", labels=["op", "vendor"]
    )
    for (op, vendor), count in counts.fallbacks.items():
        calls.add_metric([op, vendor], count)
    graphs = CounterMetricFamily("dlinfer:graphs", "Phases compiled, loaded or eager.", labels=["outcome"])
    for outcome, count in counts.phases.items():
        graphs.add_metric([outcome], count)
    entries = CounterMetricFamily("dlinfer:cache_entries", "Entries of the disk cache.", labels=["outcome"])
    for outcome, count in counts.cache.items():
        entries.add_metric([outcome], count)
    late = "Graphs compiled after the warm-up, while a request waited."
    yield from (calls, graphs, entries)
    yield CounterMetricFamily("dlinfer:late_compiles", late, counts.late)
    yield CounterMetricFamily("dlinfer:steps", "Forwards in graph mode.", counts.steps)
