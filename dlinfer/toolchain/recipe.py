"""The recipe of a toolchain's environment."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Toolchain:
    """The recipe of an environment. When the recipe changes, environments of the old recipe are out of date.

    name: unique among vendors; also the name of the environment's folder.
    summary: one line for people.
    python: the CPython version that the packages exist for, such as "3.10".
    packages: every package with its version, such as "numpy==1.24.3". No resolver chooses versions, so that the same
        recipe always creates the same environment.
    installed_bytes: disk space of the environment. download_bytes: additional space during the installation.
    files: relative path -> text of a file to write into site-packages. Such files are stubs for packages that are
        imported but hardly used.
    remove: glob patterns of harmful files to delete, relative to site-packages.
    check: Python code that must run without an error in the finished environment.
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
        """The hash of all parts of the recipe that the environment's contents depend on."""
        made_of = [self.python, self.packages, sorted(self.files.items()), self.remove, self.check]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]
