"""Print conformance results for people: a progress bar during the run, then a table of ops by checks, and failures."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dlinfer.conformance.apart import Progress as Told
from dlinfer.conformance.result import (
    DECLINED,
    FAILED,
    PASSED,
    SKIPPED,
    STATES,
    UNCLAIMED,
    Report,
    Result,
)

MOST_SHOWN = 5
"""At most this many failures are printed for one op and check. Report files have all failures."""

_COLOURS = {PASSED: "green", FAILED: "red", DECLINED: "yellow", SKIPPED: "dim", UNCLAIMED: "dim"}
_WORST = (FAILED, DECLINED, PASSED, SKIPPED, UNCLAIMED)


@contextmanager
def progress() -> Iterator[Told]:
    """Yield a function that shows progress: a bar on a terminal, else a line for each tested op and each failure."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(Console(stderr=True, width=500, no_color=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[failed]}"), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, failed="")
        failed = 0

        def told(done: int, total: int, result: Result) -> None:
            nonlocal failed
            failed += result.state == FAILED
            words = f"[red]{failed} failed[/red]" if failed else ""
            bar.update(task, description=result.op, completed=done, total=total, failed=words)

        yield told


def _lines(console: Console) -> Told:
    op = ""

    def told(done: int, total: int, result: Result) -> None:
        nonlocal op
        if result.op != op and result.state != UNCLAIMED:
            op = result.op
            console.print(f"{done}/{total}", Text(op))
        if result.state == FAILED:
            console.print(f"{done}/{total}", Text(str(result)))

    return told


def show(report: Report, console: Console | None = None) -> None:
    """Print the report. A pipe gets plain text without line wrapping, so that users can search it."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=500, no_color=True)
    console.print(_table(report))
    _failures(report, console)
    _declined(report, console)
    _notes(report, console)
    _verdict(report, console)


def _table(report: Report) -> Table:
    checks = report.checks()
    table = Table("op", *checks, title=f"conformance of {report.header.vendor}", title_justify="left")
    for op, results in report.by_op().items():
        table.add_row(
            op, *(_cell([result for result in results if result.check == check]) for check in checks)
        )
    return table


def _cell(results: list[Result]) -> Text:
    counts = Counter(result.state for result in results)
    worst = next((state for state in _WORST if counts[state]), None)
    if worst is None:
        return Text("")
    if worst in (SKIPPED, UNCLAIMED):
        return Text("-" if worst == SKIPPED else worst, style=_COLOURS[worst])
    asked = sum(counts.values()) - counts[SKIPPED] - counts[UNCLAIMED]
    return Text(str(asked) if worst == PASSED else f"{counts[PASSED]}/{asked}", style=_COLOURS[worst])


def _failures(report: Report, console: Console) -> None:
    shown: Counter[tuple[str, str]] = Counter()
    for result in report.failures:
        shown[result.op, result.check] += 1
        if shown[result.op, result.check] <= MOST_SHOWN:
            console.print(Text("FAIL ", style="red"), Text(str(result)), sep="")
    for (op, check), count in shown.items():
        if count > MOST_SHOWN:
            console.print(Text(f"     {op} {check}: {count - MOST_SHOWN} more"))


def _declined(report: Report, console: Console) -> None:
    declined = [result for result in report.results if result.state == DECLINED]
    by_reason: dict[tuple[str, str], Counter[str]] = {}
    for result in declined:
        by_reason.setdefault((result.check, result.detail), Counter())[result.op] += 1
    for (check, detail), ops in by_reason.items():
        words = ", ".join(f"{op} {count}" for op, count in ops.items())
        console.print(Text("declined ", style="yellow"), Text(f"{check}: {detail} ({words})"), sep="")


def _notes(report: Report, console: Console) -> None:
    for result in report.results:
        if result.state == PASSED and result.detail:
            console.print(Text("passed, but ", style="yellow"), Text(str(result)), sep="")


def _verdict(report: Report, console: Console) -> None:
    counts = report.counts()
    words = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    verdict = (
        "every claim holds"
        if report.holds
        else "some claims do not hold"
        if counts[FAILED]
        else "nothing passed"
    )
    style = "green" if report.holds else "red"
    console.print(
        Text(f"{report.header.vendor}: {verdict}", style=style), f" ({words}; {report.seconds:.0f} s)", sep=""
    )
