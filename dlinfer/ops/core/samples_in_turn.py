"""Samples of ops by name, for conformance and kernel tests. These request an op's samples mostly in order."""

import threading
from collections.abc import Iterator
from typing import Any

from dlinfer.ops.core.samples import Sample, SampleMaker
from dlinfer.ops.core.spec import OpSpec


class SamplesInTurn:
    """Computes samples of an op by name, anew at each request, for callers that mostly request them in order.

    An op's samples come from one random generator, so all samples before the requested one must be computed first. To
    save that work, this class keeps unfinished iterations over the samples. A request continues an iteration that has
    not yet passed the requested sample. If there is none, it starts a new iteration. No two samples share memory that
    the op writes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[Any, ...] = ()
        self._places: dict[str, int] = {}
        self._begun: dict[int, list[Iterator[Sample]]] = {}  # key: index of the next sample

    def arguments(self, op: OpSpec, make: SampleMaker, name: str) -> tuple[Any, ...]:
        """Return the arguments of the op's sample ``name``. make: a SampleMaker that has made nothing yet."""
        key = (op.name, make.dtype, make.device, make.layout, make.seed)
        with self._lock:
            if key != self._key:
                self._key, self._places, self._begun = key, {}, {}
            end = self._places.get(name, len(self._places))
            before = [begin for begin, waiting in self._begun.items() if waiting and begin <= end]
            place = max(before, default=0)
            samples = self._begun[place].pop() if before else iter(op.sample_inputs(make))
            for sample in samples:
                self._places.setdefault(sample.name, place)
                place += 1
                if sample.name == name:
                    self._begun.setdefault(place, []).append(samples)
                    return sample.args
        raise KeyError(f"op {op.name!r} has no sample {name!r}")
