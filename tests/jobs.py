"""A worker's side of ``tests.workers``. It imports nothing, so that the oracle's process may use it, too."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

ANSWERS = "WORKER_ANSWERS"
"""Environment variable: the file descriptor that answers go to; engines print to stdout."""


def answer_jobs(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer a line of JSON with another until the end of the input."""
    with os.fdopen(int(os.environ[ANSWERS]), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
