"""Merges the /metrics answers of several replicas into one. Each sample gets the label ``replica``."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Merged(Collector):
    """Collects the samples of several answers, grouped by metric family."""

    def __init__(self, answers: Mapping[str, str], own: Iterable[Metric]) -> None:
        self.answers, self.own = answers, own

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self.answers.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples
                ]
        yield from families.values()
        yield from self.own


def merge(answers: Mapping[str, str], own: Iterable[Metric] = ()) -> str:
    """Return one answer in Prometheus's text format.

    answers: label of a replica -> the text of its /metrics. own: metric families to append.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(answers, own))
    return generate_latest(registry).decode()
