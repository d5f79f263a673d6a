"""The loop: programs to workers, findings to scripts, a count of everything."""

import contextlib
import itertools
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tests.caches import fresh_cache
from tests.fuzz.planted import VARIABLE
from tests.fuzz.program import Program, from_json
from tests.fuzz.script import script
from tests.fuzz.shrink import shrink
from tests.workers import Ended, Worker

_LIMIT = 90.0  # seconds for a program; inductor compiles each of its clusters in 3
_SHRINKING = 120.0


@dataclass
class Finding:
    """A fault: how it shows, the smallest program that shows it, and how many programs did."""

    engine: str
    kind: str
    detail: str
    program: Program
    seeds: list[int] = field(default_factory=list)
    path: str = ""
    seconds: float = 0.0

    def covers(self, engine: str, kind: str, program: Program) -> bool:
        """Whether another program that fails likewise contains all steps of this one."""
        mine, other = Counter(_spelt(self.program)), Counter(_spelt(program))
        return (self.engine, self.kind) == (engine, kind) and bool(mine) and mine <= other


def _spelt(program: Program) -> list[str]:
    return [re.sub(r"-?\d+", "n", step.text) for step in program.steps]


def worker(folder: Path, plant: str = "") -> Worker:
    """What runs programs, with a cache folder of the run's own. plant: a fault to put in place."""
    environment = (
        {}
        if "DLINFER_CACHE_DIR" in os.environ
        else {"DLINFER_CACHE_DIR": str(fresh_cache(folder / "artifacts"))}
    )
    return Worker("tests.fuzz.worker", folder, environment | {VARIABLE: plant})


class Drive:
    """One run of the fuzzer over some engines."""

    def __init__(
        self, engines: Sequence[str], seed: int, folder: Path, plant: str = "", until_planted: bool = False
    ) -> None:
        """plant: a fault to put in place. until_planted: end with the first program that fails for it alone."""
        self.engines, self.seed, self.folder, self.plant = engines, seed, folder, plant
        self.until_planted = until_planted
        self.planted: Finding | None = None
        self.findings: list[Finding] = []
        self.features: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.limits: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._jobs = ((engine, number) for number in itertools.count(seed) for engine in engines)
        self._start = self._end = 0.0

    def run(self, seconds: float, workers: int = 1, quiet: bool = False) -> None:
        """Run programs for some time and report."""
        console = Console(quiet=quiet)
        console.print(f"seed {self.seed}, engines {', '.join(self.engines)}")
        self._start = time.monotonic()
        self._end = self._start + seconds
        threads = [threading.Thread(target=self._work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=not console.is_terminal) as shown:
            bar = shown.add_task("", total=seconds)
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.3)
                shown.update(bar, completed=time.monotonic() - self._start, description=self._line())
        self._report(console)

    def _line(self) -> str:
        return f"{self.counts['programs']} programs, {self.counts['found']} findings, {len(self.findings)} distinct"

    def _work(self) -> None:
        with worker(self.folder, self.plant) as child:
            while time.monotonic() < self._end and self.planted is None:
                with self._lock:
                    engine, seed = next(self._jobs)
                self._one(child, engine, seed)

    def _one(self, child: Worker, engine: str, seed: int) -> None:
        """One program. Of inductor's one in eight is compiled by g++; the others' loops run node by node."""
        job = {"seed": seed, "engine": engine, "interpreted": engine == "inductor" and seed % 8 != 0}
        before = time.monotonic()
        try:
            answer = child.ask(job, _LIMIT)
        except Ended as ended:
            with self._lock:
                self.counts["programs"] += 1
                self.counts[f"programs on {engine}"] += 1
            self._ended(child, job, ended)
            return
        with self._lock:
            self.counts["programs"] += 1
            self.counts[f"programs on {engine}"] += 1
            self.counts[f"seconds on {engine}"] += int(1000 * (time.monotonic() - before))
            self.counts[f"nodes taken by {engine}"] += answer["taken"]
            self.counts[f"nodes of {engine}"] += answer["nodes"]
            self.counts["eager raises"] += answer["raised"]
            self.features.update(answer["features"])
            if answer["limited"]:
                self.limits[answer["limited"]] += 1
            if answer["refused"]:
                self.refusals[answer["refused"].partition(":")[0]] += 1
        if answer["differences"] and answer["torch"]:
            with self._lock:
                self.counts["torch alone differs"] += 1
        elif answer["differences"]:
            difference = answer["differences"][0]
            self._found(child, job, from_json(answer["program"]), difference["kind"], _told(difference))

    def _ended(self, child: Worker, job: dict[str, Any], ended: Ended) -> None:
        """A crash or a hang; a machine that does much else besides is no hang."""
        try:
            if ended.kind == "hang":
                with contextlib.suppress(Ended):
                    child.ask(job, 4 * _LIMIT)
                    return
            program = from_json(child.ask({**job, "generate": True}, _LIMIT)["program"])
        except Ended:
            self.counts["torch alone crashes"] += 1  # eagerly, while the program was drawn
            return
        self._found(child, job, program, ended.kind, str(ended))

    def _found(self, child: Worker, job: dict[str, Any], program: Program, kind: str, detail: str) -> None:
        engine, seed = job["engine"], job["seed"]
        with self._lock:
            self.counts["found"] += 1
            self.counts[f"wrong on {engine}"] += 1
            for known in self.findings:
                if known.covers(engine, kind, program):
                    known.seeds.append(seed)
                    return
        since = time.monotonic() - self._start
        if self.until_planted:
            if self._sound_without(job, program):
                self.planted = Finding(engine, kind, detail, program, [seed], seconds=since)
            return

        def fails(candidate: Program) -> bool:
            nonlocal detail
            given = {key: value for key, value in job.items() if key != "seed"} | {
                "program": candidate.to_json()
            }
            try:
                answer = child.ask(given, _LIMIT)
            except Ended as ended:
                return ended.kind == kind
            found = answer["differences"]
            if not found or found[0]["kind"] != kind or answer["torch"]:
                return False
            if kind == "error" and found[0]["what"] not in detail:
                return False
            detail = _told(found[0])
            return True

        small = shrink(program, fails, _SHRINKING)
        with self._lock:
            for known in self.findings:
                if known.covers(engine, kind, small):
                    known.seeds.append(seed)
                    return
            finding = Finding(engine, kind, detail, small, [seed], seconds=since)
            finding.path = str(self.folder / f"{engine}-{kind.replace(' ', '-')}-{seed}.py")
            Path(finding.path).write_text(script(small, engine, detail))
            Path(finding.path).with_suffix(".json").write_text(small.to_json())
            self.findings.append(finding)

    def _sound_without(self, job: dict[str, Any], program: Program) -> bool:
        """Whether a program is all right without the planted fault."""
        given = {key: value for key, value in job.items() if key != "seed"} | {"program": program.to_json()}
        with worker(self.folder) as child:
            return not child.ask(given, _LIMIT)["differences"]

    def _report(self, console: Console) -> None:
        took = time.monotonic() - self._start
        rate = 60 * self.counts["programs"] / max(took, 1e-9)
        console.print(f"{self._line()}, {rate:.0f} programs a minute")
        for engine in self.engines:
            count, of = self.counts[f"nodes taken by {engine}"], max(self.counts[f"nodes of {engine}"], 1)
            seconds = (
                self.counts[f"seconds on {engine}"] / 1000 / max(self.counts[f"programs on {engine}"], 1)
            )
            programs, wrong = self.counts[f"programs on {engine}"], self.counts[f"wrong on {engine}"]
            share = 100 * count // of
            console.print(
                f"  {engine}: {programs} programs, {wrong} wrong, {took:.0f} s"
                f" ({seconds:.1f} s a program, it took {share} % of nodes)"
            )
        for name in ("eager raises", "torch alone differs", "torch alone crashes"):
            console.print(f"  {name}: {self.counts[name]}")
        for title, counter in (
            ("documented limits met", self.limits),
            ("refused", self.refusals),
            ("features", self.features),
        ):
            console.print(
                f"{title}: " + ", ".join(f"{name} {count}" for name, count in counter.most_common()),
                soft_wrap=True,
            )
        for found in self.findings:
            console.print(
                f"[red]{found.engine} {found.kind}[/] x{len(found.seeds)} {found.path}", soft_wrap=True
            )
            console.print(f"   {found.detail[:300]}", soft_wrap=True, markup=False)
        summary = {
            "seed": self.seed,
            "seconds": took,
            "counts": self.counts,
            "features": self.features,
            "limits": self.limits,
            "refusals": self.refusals,
            "findings": [
                {
                    "engine": one.engine,
                    "kind": one.kind,
                    "detail": one.detail,
                    "seeds": one.seeds,
                    "path": one.path,
                    "seconds": one.seconds,
                }
                for one in self.findings
            ],
        }
        (self.folder / f"summary-{self.seed}.json").write_text(json.dumps(summary, indent=1))


def _told(difference: dict[str, Any]) -> str:
    return f"call {difference['call']}: {difference['kind']} of {difference['what']}: {difference['detail']}"
