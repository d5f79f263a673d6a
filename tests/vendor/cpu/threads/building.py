"""Compiles what tests ask of the team of threads without torch: a library for ctypes, and the program of races."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from dlinfer.vendor.cpu import native

HERE = Path(__file__).parent
LIBRARY, RACE = HERE / "library.cpp", HERE / "race.cpp"


def compiled(source: Path, made: Path, flags: Sequence[str], sources: Path = native.SOURCES) -> Path:
    """``made``, compiled of one of the files here. sources: where ``threads/team.cpp`` is, in place of ours.

    Raises BuildError where there is no compiler, and CalledProcessError where it fails.
    """
    folders = [f"-I{folder}" for folder in (HERE / "alone", sources, HERE.parent)]
    command = [*native.compiler(), "-std=c++20", "-O2", "-g1", "-pthread", *flags, *folders]
    subprocess.run([*command, str(source), "-o", str(made)], check=True)
    return made
