"""``dlinfer conformance``: does a vendor do what it claims? Run every check on every op, sample and dtype."""

import argparse
import json
import sys
from pathlib import Path

from dlinfer.conformance.errors import ConformanceError
from dlinfer.conformance.result import Report

BROKEN, NOT_ASKED = 1, 2
"""Two exit statuses. BROKEN: a claim does not hold. NOT_ASKED: the vendor could not be tested."""

EXIT = (
    "Exit status: 0 if every claim of the vendor holds. 1 if a claim does not hold or nothing passed. 2 if the vendor "
    "is not installed or cannot run here, or there is no such op or check."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vendor", metavar="VENDOR", help="a vendor's name, as `dlinfer doctor` lists it")
    parser.add_argument(
        "--thorough", action="store_true", help="run every check on every sample, also on large samples"
    )
    parser.add_argument(
        "--op", action="append", default=[], metavar="OP", help="test only this op; may be repeated"
    )
    parser.add_argument(
        "--check", action="append", default=[], metavar="CHECK", help="run only this check; may be repeated"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time limit for one check (default 600)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help=(
            "write each result to FILE at once, and reuse the results in FILE that have the same versions and "
            "source"
        ),
    )
    for form, what in (("json", "as JSON"), ("junit", "as JUnit XML"), ("html", "as an HTML page")):
        parser.add_argument(f"--{form}", type=Path, metavar="FILE", help=f"write the results to FILE {what}")


def run(arguments: argparse.Namespace) -> int:
    from dlinfer.cli import conformance_view
    from dlinfer.conformance import apart

    try:
        _check_names(arguments)
        with conformance_view.progress() as progress:
            report = apart.run(
                arguments.vendor,
                ops=arguments.op,
                checks=arguments.check,
                thorough=arguments.thorough,
                timeout=arguments.timeout,
                progress=progress,
                journal=arguments.resume,
            )
    except ConformanceError as error:
        sys.stderr.write(f"error: {error}\n")
        return NOT_ASKED
    write(report, arguments.json, arguments.junit, arguments.html)
    conformance_view.show(report)
    return 0 if report.holds else BROKEN


def write(report: Report, as_json: Path | None, junit: Path | None, html: Path | None) -> None:
    if as_json is not None:
        as_json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    if junit is not None:
        from dlinfer.conformance.report import junit as as_junit

        junit.write_text(as_junit.text(report))
    if html is not None:
        from dlinfer.conformance.report import html as as_html

        html.write_text(as_html.page(report))


def _check_names(arguments: argparse.Namespace) -> None:
    from dlinfer.conformance import plan

    for what, names in plan.names().items():
        for name in getattr(arguments, what):
            if name not in names:
                detail = f"there is no {what} {name!r}. Known {what}s: {', '.join(names)}."
                raise ConformanceError(vendor=arguments.vendor, detail=detail)
