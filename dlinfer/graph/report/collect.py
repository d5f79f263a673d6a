"""The current report, and functions that write facts of a compilation into it."""

import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from dlinfer.errors import SettingError
from dlinfer.graph.report.report import GraphReport

_current: ContextVar[GraphReport | None] = ContextVar("_current", default=None)


@contextmanager
def collecting(report: GraphReport) -> Generator[None]:
    """Make ``report`` the current report of this thread, until the ``with`` block ends. ``emit`` writes into it."""
    token = _current.set(report)
    try:
        yield
    finally:
        _current.reset(token)


def emit(fill: Callable[[GraphReport], object]) -> None:
    """Call ``fill`` with the current report. If ``fill`` raises an error, warn, and let the compilation go on."""
    try:
        fill(_current.get() or GraphReport("a function", -1, ""))
    except SettingError:  # the user asked for output that does not exist
        raise
    except Exception as error:  # noqa: BLE001 - the graph is right without its report
        text = f"dlinfer: the report of a graph is incomplete: {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


@contextmanager
def timed(stage: str) -> Generator[None]:
    """Add the duration of the ``with`` block, in seconds, to ``stage`` in the current report."""
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    emit(lambda report: report.seconds.update({stage: report.seconds.get(stage, 0.0) + seconds}))
