"""The recipe of a toolchain's environment."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Toolchain:
    """The recipe of an environment. Two recipes that differ in anything make different environments.

    name: unique among vendors, and the name of its folder. summary: one line for people.
    python: the CPython that the packages exist for, as "3.10".
    packages: every package with its version, as "numpy==1.24.3": none is chosen by a resolver, so that the same
        recipe makes the same environment next year.
    installed_bytes, download_bytes: what it takes on disk, and besides while it is being made.
    files: text files that are put into site-packages, by relative path: stand-ins for packages that are imported and
        hardly used.
    remove: glob patterns of files, relative to site-packages, that harm and are removed.
    check: Python code that must run in the finished environment.
    """

    name: str
    summary: str
    python: str
    packages: tuple[str, ...]
    installed_bytes: int
    download_bytes: int
    files: Mapping[str, str] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    check: str = ""

    @property
    def digest(self) -> str:
        """A hash of everything that the environment depends on."""
        made_of = [self.python, self.packages, sorted(self.files.items()), self.remove, self.check]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]
