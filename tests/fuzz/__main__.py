"""``python -m tests.fuzz``: programs at random for some time, with a count of what they covered."""

import argparse
import random
from pathlib import Path

from tests.fuzz.drive import Drive
from tests.fuzz.program import ENGINES


def main() -> int:
    """Run the fuzzer; 1 where it found anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--engine", choices=ENGINES, action="append", help="all where none is given")
    parser.add_argument("--seed", type=int, help="of the first program; the others count up from it")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="scripts and summary")
    parser.add_argument("--plant", default="", help="a fault to put in place first (planted.py)")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.randrange(10**9)
    drive = Drive(tuple(given.engine or ENGINES), seed, given.folder, given.plant)
    drive.run(given.seconds, given.workers)
    return int(bool(drive.findings))


if __name__ == "__main__":
    raise SystemExit(main())
