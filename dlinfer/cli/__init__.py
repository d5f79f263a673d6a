"""The ``dlinfer`` command. Each subcommand stands in a module of its own, loaded when it is called."""

import argparse
import sys
from collections.abc import Sequence

from dlinfer import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; ``argv`` is ``sys.argv[1:]`` when left out."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dlinfer", description="LLM serving on any accelerator.")
    parser.add_argument("--version", action="version", version=f"dlinfer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "show what is installed here, which vendors can run and which cannot, and why"
    doctor = commands.add_parser(
        "doctor", help=text, description=f"{text.capitalize()}.", epilog=_DOCTOR_EXIT
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object (schema: docs/doctor.md)")
    doctor.set_defaults(run=_doctor)
    return parser


_DOCTOR_EXIT = "Exit status: 0 when ops can run on a vendor other than the reference, else 1."


def _doctor(arguments: argparse.Namespace) -> int:
    from dlinfer.cli import doctor

    report = doctor.collect()
    if arguments.json:
        sys.stdout.write(doctor.to_json(report) + "\n")
    else:
        from dlinfer.cli import doctor_view

        doctor_view.show(report)
    return 0 if report.healthy else 1
