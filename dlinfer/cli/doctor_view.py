"""Print doctor's report for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlinfer.cli.doctor import Report
from dlinfer.vendor.cpu.bf12 import speed

_COLOURS = {
    "PASS": "green",
    "ready": "green",
    "native": "green",
    "manual": "yellow",
    "absent": "yellow",
    "reference": "yellow",
    "FAIL": "red",
    "failed": "red",
    "none": "red",
}


def show(report: Report, console: Console | None = None) -> None:
    console = console or Console(markup=False)  # rich would take the extra in 'dlinfer[sophgo]' for a style
    if not console.is_terminal:
        console = Console(file=console.file, width=500, no_color=True, markup=False)
    for part in (_machine, _frameworks, _vendors, _ops, _selftests, _settings, _verdict):
        part(report, console)


def _machine(report: Report, console: Console) -> None:
    table = _table("environment")
    versions, cpu = report.versions, report.cpu
    table.add_row("dlinfer", versions.dlinfer)
    table.add_row("python", versions.python)
    table.add_row("torch", versions.torch)
    table.add_row("transformers", versions.transformers or "not installed")
    table.add_row("cpu", f"{cpu.capability}; {cpu.usable}; torch uses {cpu.threads} threads")
    if cpu.bf12_speedup:
        measured = speed.shown(cpu.bf12_speedup)
        table.add_row("weights", f"in 12 bits (bf12), times as fast as in bfloat16, by rows: {measured}")
    for label, bound in zip(["memory", *[""] * len(report.memory)], report.memory, strict=False):
        room, limit = _gib(bound.available_bytes), _gib(bound.limit_bytes)
        table.add_row(label, f"{room} of {limit} available ({bound.source})")
    console.print(table)


def _frameworks(report: Report, console: Console) -> None:
    table = _table("frameworks")
    for framework in report.frameworks:
        table.add_row(framework.name, _coloured(framework.state), framework.detail)
        for line in (framework.note, _step(framework.next_step)):
            if line:
                table.add_row("", "", line)
    console.print(table)
    for framework in report.frameworks:
        if framework.traceback:
            console.print(Text(framework.traceback.rstrip(), style="dim"))


def _vendors(report: Report, console: Console) -> None:
    table = _table("vendors")
    for vendor in report.vendors:
        default = ", ".join(device for device, name in report.defaults.items() if name == vendor.name)
        note = f" [default for device {default}]" if default else ""
        table.add_row(vendor.name, _coloured(vendor.state), Text(vendor.reason + note))
        if vendor.next_step:
            table.add_row("", "", Text(_step(vendor.next_step)))
    console.print(table)


def _ops(report: Report, console: Console) -> None:
    table = _table("ops", "op", *(vendor.name for vendor in report.vendors))
    for op, answers in report.ops.items():
        table.add_row(op, *(_coloured(answers[vendor.name]) for vendor in report.vendors))
    console.print(table)
    for vendor, ops in report.implementations.items():
        for op, kernels in ops.items():
            console.print(
                Text(
                    f"{vendor}: {op} runs on the first of these kernels that accepts a call: {', '.join(kernels)}"
                )
            )


def _selftests(report: Report, console: Console) -> None:
    table = _table("self-tests on this CPU", "engine", "passed", "failed", "not run")
    for selftest in report.selftests:
        table.add_row(
            selftest.engine,
            str(selftest.passed),
            str(len(selftest.failed)),
            str(selftest.not_run),
            selftest.problem,
        )
    console.print(table)
    for selftest in report.selftests:
        for case in selftest.failed:
            line = f"{selftest.engine}: self-test '{case.name}' failed in {case.precision}: {case.reason}; "
            line += f"{', '.join(case.covers)} run without it"
            console.print(Text(line, style="yellow"))


def _settings(report: Report, console: Console) -> None:
    table = _table("settings", "variable", "value", "from")
    for origin in report.settings:
        table.add_row(origin.variable, Text(origin.value or "(empty)"), origin.source)
    for variable in report.unknown_variables:
        table.add_row(variable, "is not a setting of this release", "environment")
    console.print(table)


def _verdict(report: Report, console: Console) -> None:
    for problem in report.problems:
        console.print(Text(problem, style="red"))
    if report.healthy:
        console.print(Text("PASS: ops can run here", style="green"))
    else:
        cause = (
            "solve the problems above first" if report.problems else "only the reference vendor can run here"
        )
        console.print(Text(f"FAIL: {cause}", style="red"))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", show_header=bool(columns), box=None, padding=(0, 2, 0, 0)
    )
    for column in columns:
        table.add_column(column)
    return table


def _coloured(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, "green"))  # or the name of the vendor whose kernel runs the op


def _step(text: str) -> str:
    return f"next step: {text}" if text else ""


def _gib(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB"
