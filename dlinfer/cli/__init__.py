"""The ``dlinfer`` command. Each subcommand has its own module, which is imported when the subcommand runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlinfer import __version__
from dlinfer.cli import autoload


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; ``argv`` defaults to ``sys.argv[1:]``."""
    arguments = parser_of_all().parse_args(argv)
    return arguments.run(arguments)


def parser_of_all() -> argparse.ArgumentParser:
    """Return the parser of all commands. docs/reference/cli.md is generated from this parser."""
    parser = _Parser(
        prog="dlinfer", description="LLM serving on any accelerator. Start with `dlinfer doctor`."
    )
    parser.add_argument("--version", action="version", version=f"dlinfer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "show what is installed here, which vendors can run and which cannot, and why"
    doctor = commands.add_parser("doctor", help=text, description=f"{_sentence(text)}.", epilog=_DOCTOR_EXIT)
    doctor.add_argument(
        "--json", action="store_true", help="print one JSON object (schema: docs/reference/json.md)"
    )
    doctor.add_argument(
        "--selftest",
        action="store_true",
        help="run the engines' self-test cases that never ran on this machine; by default they are only counted",
    )
    doctor.set_defaults(run=_doctor)
    _add_explain(commands)
    _add_compile(commands)
    _add_conformance(commands)
    _add_contract(commands)
    _add_new_vendor(commands)
    _add_preflight(commands)
    _add_quantise(commands)
    _add_serve(commands)
    _add_toolchain(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that can also take undeclared options.

    ``dlinfer serve`` passes these options to the servers that it starts.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse as argparse does, but store the unknown options of ``dlinfer serve`` in ``server_options``.

        ``dlinfer serve`` sets this attribute as a default of its parser. Other commands refuse unknown options.
        """
        arguments, rest = self.parse_known_args(args, namespace)
        if hasattr(arguments, "server_options"):
            arguments.server_options = rest
        elif rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return arguments


def _add_explain(commands: Any) -> None:
    text = "compile a model in graph mode and show its graphs, its fusions, where each node runs, and why"
    explain = commands.add_parser(
        "explain",
        help=text,
        description=f"{_sentence(text)}. The model runs a prefill and one decode step with a static KV cache.",
    )
    explain.add_argument(
        "folder", metavar="MODEL_FOLDER", type=Path, help="model folder in the format of Hugging Face"
    )
    explain.add_argument(
        "--batch", type=_positive, default=2, metavar="N", help="number of sequences (default 2)"
    )
    explain.add_argument(
        "--prompt-length", type=_positive, default=8, metavar="N", help="tokens in each prompt (default 8)"
    )
    explain.add_argument("--engine", help="graph engine (default: the default engine of the device's vendor)")
    explain.add_argument(
        "--static", action="store_true", help="start with constant sizes, not with symbolic sizes"
    )
    for form, what in (
        ("txt", "as text"),
        ("json", "as JSON"),
        ("html", "as an HTML page that lists what runs, in order and by layer"),
    ):
        explain.add_argument(
            f"--{form}", type=Path, metavar="FILE", help=f"write the full explanation to FILE {what}"
        )
    explain.set_defaults(run=_explain)


def _add_compile(commands: Any) -> None:
    from dlinfer.cli import compile

    text = "compile a model folder to a file for a vendor's own runtime"
    other = "It writes Sophgo's bmodel. A .dlinfer file is made in Python: dlinfer.compile(...).save(path)."
    command = commands.add_parser("compile", help=text, description=f"{_sentence(text)}. {other}")
    compile.add_arguments(command)
    command.set_defaults(run=compile.run)


def _add_conformance(commands: Any) -> None:
    from dlinfer.cli import conformance

    text = "test every claim of a vendor's kernels and engine, and list every claim that does not hold"
    command = commands.add_parser(
        "conformance",
        help=text,
        description=f"{_sentence(text)} (docs/guides/conformance.md).",
        epilog=conformance.EXIT,
    )
    conformance.add_arguments(command)
    command.set_defaults(run=conformance.run)


def _add_contract(commands: Any) -> None:
    from dlinfer.cli import contract

    text = "check LMDeploy's source against dlinfer's interface, and list every difference"
    command = commands.add_parser(
        "contract", help=text, description=f"{_sentence(text)}.", epilog=contract.EXIT
    )
    contract.add_arguments(command)
    command.set_defaults(run=contract.run)


def _add_new_vendor(commands: Any) -> None:
    from dlinfer.cli import new_vendor

    text = "create a starter package for a new vendor: kernels, a device, an engine and a conformance test"
    command = commands.add_parser(
        "new-vendor",
        help=text,
        description=f"{_sentence(text)} (docs/guides/write_a_vendor.md).",
        epilog=new_vendor.EXIT,
    )
    new_vendor.add_arguments(command)
    command.set_defaults(run=new_vendor.run)


def _add_preflight(commands: Any) -> None:
    from dlinfer.cli import preflight

    text = (
        "check whether LMDeploy can serve a model folder, without loading its weights: refusals, ops, memory"
    )
    command = commands.add_parser(
        "preflight", help=text, description=f"{_sentence(text)}.", epilog=preflight.EXIT
    )
    preflight.add_arguments(command)
    command.set_defaults(run=preflight.run)


def _add_quantise(commands: Any) -> None:
    from dlinfer.cli import quantise

    text = "quantise a model folder to 4 or 8 bits for LMDeploy, optionally with calibration data"
    command = commands.add_parser(
        "quantise", help=text, description=f"{_sentence(text)}.", epilog=quantise.EXIT
    )
    quantise.add_arguments(command)
    command.set_defaults(run=quantise.run)


def _add_serve(commands: Any) -> None:
    from dlinfer.cli import serve

    text = "serve a model with one or more LMDeploy servers for each NUMA node, behind a router"
    command = commands.add_parser(
        "serve",
        help=text,
        description=f"{_sentence(text)} (docs/guides/scaling.md).",
        epilog=serve.EXIT,
        allow_abbrev=False,
    )
    serve.add_arguments(command)
    command.set_defaults(run=serve.run)


def _add_toolchain(commands: Any) -> None:
    text = "install the compilers and runtimes of vendors whose packages need an older Python"
    toolchain = commands.add_parser(
        "toolchain", help=text, description=f"{_sentence(text)} (docs/vendors/toolchains.md)."
    )
    actions = toolchain.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    actions.add_parser("list", help="list all toolchains and show which are installed")
    for name, what in (
        ("install", "install toolchains into dlinfer's cache folder"),
        ("path", "print the folders of installed toolchains"),
        ("remove", "delete installed toolchains"),
    ):
        actions.add_parser(name, help=what).add_argument("names", metavar="NAME", nargs="+")
    toolchain.set_defaults(run=_toolchain)


def _sentence(text: str) -> str:
    """Return the text with a capital first letter.

    Unlike str.capitalize(), this keeps the case of all other letters.
    """
    return text[0].upper() + text[1:]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


_DOCTOR_EXIT = (
    "Exit status: 0 if ops can run on a vendor other than the reference and no problem was found, else 1."
)


def _doctor(arguments: argparse.Namespace) -> int:
    try:
        from dlinfer.cli import doctor
    except RuntimeError as error:
        failed = autoload.reason(error)
        if failed is None:
            raise
        options = ["--json"] * arguments.json + ["--selftest"] * arguments.selftest
        return autoload.run_without(["doctor", *options], failed)
    report = doctor.collect(selftest=arguments.selftest)
    if arguments.json:
        sys.stdout.write(doctor.to_json(report) + "\n")
    else:
        from dlinfer.cli import doctor_view

        doctor_view.show(report)
    return 0 if report.healthy else 1


def _explain(arguments: argparse.Namespace) -> int:
    from dlinfer.cli import explain

    return explain.run(arguments)


def _toolchain(arguments: argparse.Namespace) -> int:
    from dlinfer.cli import toolchain

    return toolchain.run(arguments)
