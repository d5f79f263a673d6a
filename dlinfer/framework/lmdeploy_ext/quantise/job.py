"""Runs a part of the work in a process of its own: a JSON object goes in, another comes out.

A folder holds both, as job.json and answer.json, beside any tensors that the two processes share.
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
    """A job failed; its text names how, and the last line that it printed. is_killed: the system ended it."""

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
    """Run a module of this package in ``folder`` and return its answer. Raises JobError.

    on_line: gets each line that it prints. settings: environment variables to set.
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
    """In the job's process: call ``work`` with the folder and the job, and write its answer."""
    folder = Path(sys.argv[1])
    result = work(folder, json.loads((folder / "job.json").read_text()))
    (folder / "answer.json").write_text(json.dumps(result))
