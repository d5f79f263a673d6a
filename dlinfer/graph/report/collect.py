"""Where compilations emit what they observe, and the report that collects it."""

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
    """Let ``report`` collect what this thread emits inside the block."""
    token = _current.set(report)
    try:
        yield
    finally:
        _current.reset(token)


def emit(fill: Callable[[GraphReport], object]) -> None:
    """Call ``fill`` with the report that collects. An error in it is warned of, and compiling goes on."""
    try:
        fill(_current.get() or GraphReport("a function", -1, ""))
    except SettingError:  # the user asked for output that does not exist
        raise
    except Exception as error:  # noqa: BLE001 - the graph is right without its report
        text = f"dlinfer: the report of a graph is incomplete: {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


@contextmanager
def timed(stage: str) -> Generator[None]:
    """Add the seconds of a block to a stage of the report."""
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    emit(lambda report: report.seconds.update({stage: report.seconds.get(stage, 0.0) + seconds}))
