"""The code of a package as it was loaded, as a digest.

Python does not keep the text of what it loads, so the files are hashed later, when somebody asks. The text of a loaded
module is the loaded one only while its file has not changed since: the file's change time says so (``ctime``, which the
kernel sets at each write, rename and copy and which no tool sets back). Where it did change, nobody can tell which of
both texts runs, and there is no digest: nothing may be taken from a cache then, or put there.
"""

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_LIBRARIES = (".so", ".pyd", ".dylib")
_COARSE = 50_000_000
"""Nanoseconds by which a file system's clock may be behind the process's own."""


class CodeChangedError(Exception):
    """The file of a loaded module changed on disk; the text names it."""


class LoadedCode:
    """The Python code of one package, or of a module that is one file, since it was loaded.

    root: its folder or file. module: the name that its modules' names begin with. loaded_at: a time in nanoseconds
    before which none of its modules was loaded.
    """

    def __init__(self, root: Path, module: str, loaded_at: int) -> None:
        self.root = root
        self.module = module
        self._loaded_at = loaded_at
        self._digest = ""
        self._changed = ""
        self._known: set[str] = set()
        self._modules = 0

    def digest(self) -> str:
        """The digest: equal for equal code, wherever it lies. Raises CodeChangedError.

        It is made once, of all files. Modules that are loaded later must have the text that it was made of.
        """
        if not self._changed:
            try:
                if not self._digest:
                    start = time.time_ns()
                    self._check_new_modules()
                    self._digest = self._read()
                    self._loaded_at = start
                elif len(sys.modules) != self._modules:
                    self._check_new_modules()
            except CodeChangedError as error:
                self._changed = str(error)  # for good: a file that is put back does not tell what was loaded
        if self._changed:
            raise CodeChangedError(self._changed)
        return self._digest

    def _check_new_modules(self) -> None:
        """Raise CodeChangedError where a module that was loaded since the last look has another text by now."""
        self._modules = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if name in self._known or not f"{name}.".startswith(f"{self.module}."):
                continue
            self._known.add(name)
            path = getattr(module, "__file__", None)
            if path is None:
                continue
            try:
                said = os.stat(path)
            except OSError as cause:
                raise CodeChangedError(f"{path} is gone since {name} was loaded") from cause
            if max(said.st_ctime_ns, said.st_mtime_ns) > self._loaded_at - _COARSE:
                raise CodeChangedError(f"{path} changed since {name} was loaded")

    def _read(self) -> str:
        made = hashlib.sha256()
        for name, path in sorted(_files(self.root)):
            if path.endswith(".py"):
                content = Path(path).read_bytes()
                made.update(f"{name} {len(content)}\n".encode() + content)
            else:  # too large to read: its size and its time stand for it
                said = os.stat(path)
                made.update(f"{name} {said.st_size} {said.st_mtime_ns}\n".encode())
        return made.hexdigest()[:32]


def _files(root: Path) -> Iterator[tuple[str, str]]:
    """(name from the root on, path) of each file of code."""
    if root.is_file():
        yield root.name, str(root)
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for file in files:
            if file.endswith((".py", *_LIBRARIES)):
                path = os.path.join(folder, file)
                yield os.path.relpath(path, root), path
