"""``dlinfer quantise``: quantise a floating-point checkpoint to 4 or 8 bits, in a format that LMDeploy reads."""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlinfer.errors import DlinferError

if TYPE_CHECKING:
    from dlinfer.framework.lmdeploy_ext.quantise.loss import Loss
    from dlinfer.framework.lmdeploy_ext.quantise.run import Report

FORMATS = ("awq-int4", "w8a8", "fp8")
EXIT = (
    "Exit status: 0 if the folder was written or the loss measured. 1 if something is refused. 2 if options conflict "
    "or LMDeploy cannot be imported. 130 or 143 if a signal ended it. Nothing is written unless the status is 0."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="MODEL",
        type=Path,
        help="folder of a floating-point model in the format of Hugging Face",
    )
    parser.add_argument(
        "--format", choices=FORMATS, required=True, help="format of the quantised linear layers"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="the folder to write, which must not exist"
    )
    what.add_argument(
        "--loss",
        action="store_true",
        help=(
            "write nothing; serve the model as it is and with weights packed by DLINFER_CPU_WEIGHTS, and compare "
            "logits"
        ),
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="number of inputs that share a scale, only for awq-int4 (default 128)",
    )
    looked = parser.add_argument_group("calibration, only for awq-int4")
    looked.add_argument(
        "--calibrate",
        type=Path,
        metavar="TEXT",
        help=(
            "file of text that is typical of the model's input; auto-round chooses the rounding by it "
            "(dlinfer[quantise])"
        ),
    )
    looked.add_argument(
        "--samples", type=int, help="maximum number of pieces of the text to use (default 128)"
    )
    looked.add_argument("--length", type=int, help="tokens in each piece (default 512)")
    looked.add_argument("--steps", type=int, help="search steps for each layer (default 200)")
    parser.add_argument(
        "--text", type=Path, metavar="TEXT", help="for --loss: file of text (default: Python's own help)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="for --loss: number of the text's tokens to use (default 1024)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object (schema: docs/reference/json.md)"
    )
    parser.set_defaults(usage_error=parser.error)


_SEARCH = ("samples", "length", "steps")
_OF_LOSS = ("text", "tokens")


def _check_together(arguments: argparse.Namespace) -> None:
    """Exit with a usage error if one option would have no effect beside the other options.

    The error names that option.
    """
    if arguments.loss:
        # Packing at load time (``--loss`` measures it) chooses group sizes itself and uses no calibration data.
        beside, unused = "--loss", ("group_size", "calibrate", *_SEARCH)
    else:
        beside, unused = "--output", _OF_LOSS
    unfit = [f"--{name.replace('_', '-')}" for name in unused if getattr(arguments, name) is not None]
    if unfit:
        arguments.usage_error(f"not allowed with {beside}: {', '.join(unfit)}")
    unfit = [f"--{name}" for name in _SEARCH if getattr(arguments, name) is not None]
    if unfit and arguments.calibrate is None:
        arguments.usage_error(f"not allowed without --calibrate: {', '.join(unfit)}")


def _given(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def run(arguments: argparse.Namespace) -> int:
    _check_together(arguments)
    try:
        from dlinfer.framework.lmdeploy_ext.quantise.calibration import Calibration
        from dlinfer.framework.lmdeploy_ext.quantise.run import format_of, quantise

        if arguments.loss:
            return _loss(arguments)
        looked = None
        if arguments.calibrate is not None:
            looked = Calibration(arguments.calibrate, **_given(arguments, _SEARCH))
        with _ending(), _progress(quiet=arguments.json) as progress:
            form = format_of(arguments.format, arguments.group_size)
            report = quantise(arguments.folder, arguments.output, form, progress, looked)
    except ImportError as error:
        sys.stderr.write(f"error: LMDeploy cannot be imported: {error}\n")
        return 2
    except (DlinferError, OSError) as error:
        _tell(error, as_json=arguments.json)
        return 1
    except KeyboardInterrupt as end:
        sys.stderr.write(f"interrupted: {arguments.output or 'the loss'} was not written\n")
        return 128 + (signal.SIGTERM if isinstance(end, _Terminated) else signal.SIGINT)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    else:
        show(report)
    return 0


def _loss(arguments: argparse.Namespace) -> int:
    from dlinfer.framework.lmdeploy_ext.quantise.loss import measure

    with _progress(quiet=arguments.json) as progress:
        loss = measure(
            arguments.folder,
            arguments.format,
            tell=lambda text: progress(0, 1, text),
            **_given(arguments, _OF_LOSS),
        )
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(loss), indent=2) + "\n")
    else:
        show_loss(loss)
    return 0


def show_loss(loss: "Loss", console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=500, no_color=True)
    title = f"{loss.folder}, {loss.tokens} tokens of {loss.text}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("", "perplexity", "logit error", "worst logit", "divergence", "same token"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("as it is stored", f"{loss.perplexity:.5g}")
    for way in loss.ways:
        table.add_row(
            f"{loss.format}, head {way.head}",
            f"{way.perplexity:.5g}",
            f"{way.logit_error:.2%}",
            f"{way.worst_logit:.3g}",
            f"{way.divergence:.3g}",
            f"{way.same_token:.1%}",
        )
    console.print(table)


def show(report: "Report", console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=500, no_color=True)
    table = Table(title=report.out, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("", "tensors", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    kept = report.bytes_before - report.weights_before
    table.add_row(
        report.format, str(report.quantised), _mib(report.weights_before), _mib(report.weights_after)
    )
    table.add_row("kept", str(report.kept), _mib(kept), _mib(kept))
    together = str(report.quantised + report.kept)
    table.add_row("together", together, _mib(report.bytes_before), _mib(report.bytes_after))
    console.print(table)
    error = f"{report.worst_error:.2%} of its norm, {report.worst_tensor}"
    console.print(Text(f"largest error of a weight, with a scale for {report.group}: {error}"))
    if report.perplexity is not None:
        perplexity = report.perplexity
        console.print(
            Text(
                f"perplexity of held-out text: {perplexity.floats:.4g} in floats, {perplexity.nearest:.4g} rounded "
                f"to the nearest, {perplexity.calibrated:.4g} calibrated with {perplexity.samples} samples"
            )
        )


class _Terminated(KeyboardInterrupt):
    """Raised when SIGTERM arrives. It ends the command as Ctrl-C does: files written so far are removed."""


@contextmanager
def _ending() -> Iterator[None]:
    def end(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # other threads cannot set signal handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(error: DlinferError | OSError, as_json: bool) -> None:
    if as_json:
        text, step = (
            (error.explanation, error.step)
            if isinstance(error, DlinferError)
            else (str(error), "check that the model's files can be read")
        )
        said = {"error": type(error).__name__, "text": text, "next_step": step}
        sys.stdout.write(json.dumps(said, indent=2) + "\n")
    else:
        sys.stderr.write(f"error: {error}\n")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that shows progress on standard error: a bar on a terminal, else nothing."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("looking", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
