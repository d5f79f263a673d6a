"""Runs a module of this package in a separate process, with a JSON object as input and another as output.

A folder holds the two objects as job.json and answer.json, and any tensors that the two processes share.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dlinfer
from dlinfer.toolchain import process

_SECONDS = 7 * 24 * 3600.0


class JobError(Exception):
    """A job's process failed. The message quotes the last line that the process printed.

    is_killed: whether SIGKILL ended the process.
    """

    def __init__(self, failed: process.ProcessFailedError) -> None:
        super().__init__(f"{failed}: {failed.lines[-1] if failed.lines else 'it printed nothing'}")
        self.is_killed = "by signal 9" in str(failed)


def run(
    module: str,
    folder: Path,
    job: dict[str, Any],
    on_line: Callable[[str], None] | None = None,
    **settings: str,
) -> dict[str, Any]:
    """Run a module of this package in ``folder``, with ``job`` as input, and return its answer. Raises JobError.

    on_line: called with each line that the process prints. settings: environment variables to set.
    """
    (folder / "job.json").write_text(json.dumps(job))
    root = str(Path(dlinfer.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **settings}
    command = [sys.executable, "-m", f"{__package__}.{module}", str(folder)]
    try:
        process.run(command, seconds=_SECONDS, folder=folder, environment=environment, on_line=on_line)
    except process.ProcessFailedError as failed:
        raise JobError(failed) from failed
    return json.loads((folder / "answer.json").read_text())


def answer(work: Callable[[Path, dict[str, Any]], dict[str, Any]]) -> None:
    """Call ``work`` with the job's folder and JSON object, and write the result as answer.json.

    The job's process calls this function. The first command-line argument of the process is the folder.
    """
    folder = Path(sys.argv[1])
    result = work(folder, json.loads((folder / "job.json").read_text()))
    (folder / "answer.json").write_text(json.dumps(result))
