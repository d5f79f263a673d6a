"""Finds the C++ compiler of this machine. This module imports only the standard library."""

import os
import shlex
import shutil

COMPILERS = ("c++", "g++", "clang++")  # CXX overrides it


class BuildError(Exception):
    """The library cannot be built here; the message says why. ``native.load`` keeps the message for ``why_not``."""


def compiler() -> list[str]:
    """Return the first words of the compiler's command line. Raises BuildError if there is no compiler."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in [chosen[0]] if chosen else COMPILERS:
        if shutil.which(name):
            return chosen or [name]
    raise BuildError(
        f"no C++ compiler ({'CXX=' + chosen[0] if chosen else ', '.join(COMPILERS)}) is installed; "
        "install one, or set CXX"
    )
