"""``dlinfer serve`` with servers that start in a second: ``python -m tests.serve.stub_serve COMMAND LINE``.

The router, signals, restarts and joins are the real ones; each server is benchmarks/routers/stub.py. A model of the
name ``broken`` gives servers that end at once.
"""

import sys

from dlinfer.cli import main
from dlinfer.serve.supervisor import Supervisor


def stub_command(self: Supervisor, model: str, address: tuple[str, int]) -> list[str]:
    """The command of one stub."""
    host, port = address
    if model == "broken":
        return [sys.executable, "-c", "print('no weights in this folder'); raise SystemExit(3)"]
    return [sys.executable, "-m", "benchmarks.routers.stub", str(port), host]


if __name__ == "__main__":
    Supervisor._command = stub_command
    sys.exit(main(["serve", *sys.argv[1:]]))
