"""Prints the lines of ``dlinfer serve``. Serving goes on if nobody reads them.

This module imports only the standard library.
"""

import contextlib
import logging
import os
import sys


def say(line: str) -> None:
    """Print a line. Drop the line if it cannot be printed.

    If the reader of a pipe is gone, also drop all later output of this process, so that no flush at the end fails.
    """
    try:
        print(line, flush=True)
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # stdout may be no file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
    except (OSError, ValueError):  # a full disk, a closed stdout, or a character that stdout cannot encode
        pass


class LogLines(logging.Handler):
    """A logging handler that prints records with ``say``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a faulty call of a logger must not end its caller
            self.handleError(record)
        else:
            say(line)
