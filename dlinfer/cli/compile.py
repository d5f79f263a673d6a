"""``dlinfer compile``: compile a Hugging Face model folder to a file for a vendor's own runtime."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlinfer.errors import DlinferError

ENGINES = ("sophgo",)
"""The engines that compile to a file for the vendor's runtime.

All other engines compile in the process of the model.
"""

_AGAIN = 0.05
"""Seconds until the exception of a signal that Python dropped is raised again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="MODEL_FOLDER", type=Path, help="model folder in the format of Hugging Face"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--engine", choices=ENGINES, required=True, help="engine whose compiler to use")
    parser.add_argument(
        "--chip", default="bm1684x", help="chip to compile for: bm1684x (default), bm1688 or bm1690"
    )
    parser.add_argument(
        "--quantize",
        default="F16",
        help="number format: F32, F16 (default), BF16, or with weights of 8 or 4 bits: W8F16, W8BF16, W4F16, W4BF16",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        default=512,
        metavar="N",
        help="maximum number of tokens, prompt and answer together (default 512)",
    )
    parser.add_argument(
        "--stages",
        type=_lengths,
        default=(),
        metavar="N,N",
        help="prompt lengths to compile prefills for, in ascending order (default: --seq-length only)",
    )
    parser.add_argument(
        "--cores", type=int, default=1, metavar="N", help="number of the chip's cores to use (default 1)"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=64,
        metavar="N",
        help="number of 4-bit weights that share a scale (default 64)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of parallel compilations (default 1)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="S",
        help="time limit in seconds for one net (default 3600)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Return the exit status: 0, 1 on an error, or 128 plus the number of the signal that ended the command."""
    try:
        with _ending():
            _sophgo(arguments)
    except KeyboardInterrupt as end:
        number = _number(end)
        text = (
            f"{signal.Signals(number).name}: {arguments.output} was not written; compiled nets are kept for the "
            "next try"
        )
        sys.stderr.write(f"ended by {text}\n")
        return 128 + number
    except (DlinferError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"written: {arguments.output} ({arguments.output.stat().st_size} bytes)\n")
    return 0


class _Ended(KeyboardInterrupt):
    """Raised in the main thread when a signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _number(end: KeyboardInterrupt) -> int:
    return end.number if isinstance(end, _Ended) else signal.SIGINT


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Inside the ``with`` block, SIGTERM and SIGHUP end the command as Ctrl-C does: by an exception.

    Without this, a signal would kill the command at once, and the compilers that it started would go on.
    """

    def end(number: int, frame: Any) -> None:
        raise _Ended(number)

    here = threading.current_thread() is threading.main_thread()  # other threads cannot set signal handlers
    asking = (signal.SIGTERM, signal.SIGHUP) if here else ()
    signals = [number for number in asking if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in signals:
            signal.signal(number, end)
        with _asked_again() if here else contextlib.nullcontext():
            yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _asked_again() -> Iterator[None]:
    """A context manager. If Python drops a signal's exception inside the block, raise the exception again soon after.

    Python drops an exception that is raised inside a finalizer.
    """
    lost: list[int] = []
    before = sys.unraisablehook

    def dropped(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)
            return
        lost.append(_number(unraisable.exc_value))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)

    def again(number: int, frame: Any) -> None:
        raise _Ended(lost[-1])

    alarm = signal.signal(signal.SIGALRM, again)
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = before
        signal.signal(signal.SIGALRM, alarm)


def _sophgo(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dlinfer.vendor.sophgo.compiler.options import BmodelOptions
    from dlinfer.vendor.sophgo.llm.build import LlmOptions, compile_folder

    compiler = BmodelOptions(
        chip=arguments.chip,
        quantize=arguments.quantize,
        cores=arguments.cores,
        group_size=arguments.group_size,
        timeout=arguments.timeout,
    )
    options = LlmOptions(
        compiler, seq_length=arguments.seq_length, stages=arguments.stages, jobs=arguments.jobs
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("nets"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("loading the model", total=None)

        def told(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total, description=name)

        compile_folder(arguments.folder, arguments.output, options, told)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of whole numbers") from None
