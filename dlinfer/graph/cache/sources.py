"""Compute a digest of a package's code as this process loaded it.

Python does not keep the text of the modules that it loads, so the files are hashed later, when a key needs a digest. A
file that has not changed since it was loaded still has the loaded text. Its ``ctime`` shows this: the kernel sets
``ctime`` at each write, rename and copy, and no tool sets it back. If a file changed, nobody knows which of the two
texts runs. Then there is no digest, and the process neither reads nor writes a cache.

A version number would be less code. But an editable install changes without a new version, and must never run a stale
graph. Hashing dlinfer takes 50 ms, once in a process.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

_LIBRARIES = {".so", ".pyd", ".dylib"}
_COARSE = 50_000_000
"""The number of nanoseconds that a file system's clock may be behind the process's clock."""


class CodeChangedError(Exception):
    """The file of a loaded module changed on disk. The error's text names the file."""


class LoadedCode:
    """The code of a package, or of a module with one file, as this process loaded it.

    root: the package's folder, or the module's file.
    module: the name of the package or module, such as ``dlinfer``.
    loaded_at: a time in nanoseconds, before the first module of the package was loaded.
    """

    def __init__(self, root: Path, module: str, loaded_at: int) -> None:
        self.root = root
        self.module = module
        self._loaded_at = loaded_at
        self._digest = ""
        self._change = ""
        self._checked: set[str] = set()
        self._modules = 0

    def digest(self) -> str:
        """Return the digest of the loaded code. It does not depend on the location of the folder.

        Raises CodeChangedError if a loaded file changed. The first call computes the digest from all files. Each later
        call checks the modules that were loaded since: their files must not have changed since the first call.
        """
        now = time.time_ns()
        if not self._change and len(sys.modules) != self._modules:
            # This error stays: even if the old file is put back, the loaded text is unknown.
            self._change = self._changed_module()
        if self._change:
            raise CodeChangedError(self._change)
        if not self._digest:
            self._digest, self._loaded_at = self._hashed(), now
        return self._digest

    def _changed_module(self) -> str:
        """Check the files of modules that no earlier call checked.

        Return a text that names a file that was changed or removed; empty if there is none.
        """
        self._modules = len(sys.modules)
        for name, module in list(sys.modules.items()):
            path: str | None = getattr(module, "__file__", None)
            if path is None or name in self._checked or not f"{name}.".startswith(f"{self.module}."):
                continue
            self._checked.add(name)
            try:
                status = os.stat(path)
            except OSError:
                return f"{path} was removed after {name} was loaded"
            if max(status.st_ctime_ns, status.st_mtime_ns) > self._loaded_at - _COARSE:
                return f"{path} changed after {name} was loaded"
        return ""

    def _hashed(self) -> str:
        paths = [self.root] if self.root.is_file() else self.root.rglob("*")
        digest = hashlib.sha256()
        for path in sorted(path for path in paths if "__pycache__" not in path.parts):
            name = path.relative_to(self.root.parent)
            if path.suffix == ".py":
                content = path.read_bytes()
                digest.update(f"{name} {len(content)}\n".encode() + content)
            elif path.suffix in _LIBRARIES:  # too large to read: its size and its time stand for it
                status = path.stat()
                digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:32]
