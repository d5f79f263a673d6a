"""Put each fault of the table into a copy of the tree and run the tests that are to catch it.

    python -m tests.mutations [PART OF A NAME]

The exit status is 1 where one was not caught. Takes a quarter of an hour.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.mutations.table import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "benchmarks")
FAILED = 1
"""Pytest's exit status where tests ran and some failed; others mean that none ran."""


def put(mutation: Mutation, tree: Path) -> None:
    """Raises ValueError where the text is not there, or not once: the table is out of date."""
    file = tree / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name}: {mutation.file} has {text.count(mutation.old)} times: {mutation.old}"
        )
    file.write_text(text.replace(mutation.old, mutation.new))


def is_caught(mutation: Mutation) -> bool:
    """Whether a test fails of a fault."""
    with tempfile.TemporaryDirectory(prefix="dlinfer-mutation-") as temp:
        tree = Path(temp, "tree")
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        put(mutation, tree)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "CI": "true"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, FAILED):
        raise RuntimeError(f"{mutation.name}: no test ran\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode == FAILED


def main(part: str = "") -> int:
    console = Console()
    missed = []
    chosen = [mutation for mutation in MUTATIONS if part in mutation.name]
    for number, mutation in enumerate(chosen, 1):
        with console.status(f"{number} of {len(chosen)}: {mutation.name}"):
            caught = is_caught(mutation)
        console.print(f"{'caught' if caught else '[red]MISSED[/red]'}  {mutation.name}")
        missed += [] if caught else [mutation.name]
    console.print(f"{len(chosen) - len(missed)} of {len(chosen)} faults were caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
