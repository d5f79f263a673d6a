"""``dlinfer contract``: does the adaptor work with an LMDeploy release? LMDeploy's source is read, never imported."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlinfer.errors import FrameworkSourceError

if TYPE_CHECKING:
    from dlinfer.framework.lmdeploy_ext.contract.drift import Report

ESSENTIAL, NOT_READ, OPTIONAL = 1, 2, 3
"""Three exit statuses. ESSENTIAL: LMDeploy changed a thing that the adaptor cannot work without.

NOT_READ: there is no source to read. OPTIONAL: LMDeploy changed only things that the adaptor can work without.
"""

EXIT = (
    "Exit status: 0 if nothing drifted, 1 if something essential drifted, 2 if the source cannot be read, 3 if "
    "only things drifted that the device can do without."
)
_COLOURS = {"essential": "red", "optional": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        type=Path,
        metavar="FOLDER",
        help="folder of an unpacked wheel of LMDeploy (default: the installed LMDeploy)",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="device type to check (default cpu)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object (schema: docs/reference/json.md)"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="record this source as reviewed: write a file into the package, in a checkout of dlinfer",
    )


def run(arguments: argparse.Namespace) -> int:
    from dlinfer.framework.lmdeploy_ext.contract import check

    try:
        if arguments.record:
            sys.stdout.write(f"written: {check.record(arguments.source)}\n")
            return 0
        report = check.check(arguments.device, arguments.source)
    except FrameworkSourceError as error:
        sys.stderr.write(f"error: {error}\n")
        return NOT_READ
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    else:
        show(report)
    return ESSENTIAL if report.essential else OPTIONAL if report.drifts else 0


def show(report: "Report", console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=1000, no_color=True)
    looked = report.looked
    console.print(
        Text(f"LMDeploy {report.lmdeploy} ({report.source}), device {report.device}"), soft_wrap=True
    )
    console.print(
        f"compared: {looked.names} names that LMDeploy imports, {looked.calls} calls, {looked.specs} BuildSpecs, "
        f"{looked.patches} patches, {looked.methods} methods, {looked.imports} names that dlinfer imports; record "
        f"of {report.record}",
        soft_wrap=True,
    )
    if report.drifts:
        console.print(_drifts(report))
    if report.elsewhere:
        console.print(_elsewhere(report))
    _verdict(report, console)


def _drifts(report: "Report") -> Table:
    table = _table("drift", "severity", "kind", "what")
    for drift in report.drifts:
        table.add_row(Text(drift.severity, style=_COLOURS[drift.severity]), drift.kind, Text(drift.where))
        for label, text in (("used", drift.used), ("offered", drift.offered), ("next step", drift.next_step)):
            table.add_row("", "", Text(f"{label}: {text}"))
    return table


def _elsewhere(report: "Report") -> Table:
    table = _table(f"not provided for {report.device}, and not used there", "name", "where", "why")
    for name in report.elsewhere:
        table.add_row(Text(name.name), Text(name.where), Text(name.reason))
    return table


def _verdict(report: "Report", console: Console) -> None:
    essential = sum(drift.severity == "essential" for drift in report.drifts)
    optional = len(report.drifts) - essential
    admitted = "inside" if report.admitted else "outside"
    where = f"{report.lmdeploy} is {admitted} the tested range"
    if not report.drifts:
        console.print(Text(f"PASS: nothing drifted; {where}", style="green"))
    else:
        style = "red" if essential else "yellow"
        console.print(Text(f"DRIFT: {essential} essential, {optional} optional; {where}", style=style))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
