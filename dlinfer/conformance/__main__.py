"""The child process of ``apart``: ``python -m dlinfer.conformance DESCRIPTOR REQUEST``. The child writes JSON lines."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlinfer.conformance import here, journal, plan
from dlinfer.errors import DlinferError


def main(descriptor: int, request: dict[str, Any]) -> int:
    """Run all checks except those whose results an earlier run left in the journal.

    Write a line when a check begins, and a line with its result.

    descriptor: the file descriptor of the pipe to write to.
    request: the arguments of ``apart.run``, and the path of the journal. A journal is ignored if it belongs to another
        request, or to other versions or another source of dlinfer and the vendor (see ``journal.key_of``).
    """
    with os.fdopen(descriptor, "w", buffering=1) as out:

        def say(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")

        try:
            subject = plan.subject_of(request["vendor"])
            limits = {name: request[name] for name in ("ops", "checks", "thorough")}
            tasks = here.tasks(subject, **limits)
        except DlinferError as error:
            say(refused=str(error))
            return 1
        header = here.header(subject, thorough=request["thorough"])
        key = journal.key_of(request, header, subject.vendor)
        kept, results = journal.read(Path(request["journal"]))
        done = {result.asked for result in results} if kept == key else set()
        say(total=len(tasks), header=asdict(header), key=key)
        for task in tasks:
            if here.named(task).asked not in done:
                say(begins=asdict(here.named(task)))
                say(result=asdict(here.result(task)))
        say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.loads(sys.argv[2])))
