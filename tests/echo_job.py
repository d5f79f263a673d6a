"""A worker for the tests of workers: it says who it is, and does harm when it is told to."""

import os
import subprocess
import sys
import time
from typing import Any

from tests.jobs import answer_jobs


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """do: abort, sleep, raise, orphan, or nothing."""
    print(f"process {os.getpid()} said {job.get('say', '')} {os.environ.get('SEEN', '')}".strip())
    what = job.get("do", "")
    if what == "abort":
        os.abort()
    if what == "sleep":
        time.sleep(600)
    if what == "raise":
        return {"raised": "told to"}
    if what == "orphan":
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        orphan = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return {"process": os.getpid(), "orphan": orphan.pid}
    return {"process": os.getpid(), "path": sys.path}


if __name__ == "__main__":
    answer_jobs(answer)
