"""How far a matrix is: a bar on a terminal, a line now and then in a log."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 25

Advance = Callable[[list[str]], None]
"""Called with what there is to say of one more finished item, a line each."""


@contextmanager
def progress(title: str, total: int, done: int, console: Console) -> Iterator[Advance]:
    """Show the progress of ``total`` items of which ``done`` are finished already; callable from any thread."""
    lock = threading.Lock()
    finished = done
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, completed=done)

        def advance(lines: list[str]) -> None:
            nonlocal finished
            with lock:
                finished += 1
                if not console.is_terminal and finished % LINE_EVERY == 0:
                    lines = [*lines, f"{title}: {finished} of {total}"]
                for line in lines:
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
                bar.advance(task)

        yield advance
