"""Compiled nets in the cache folder: a file ``<key>-<digest of its content>.bmodel`` each, so that a damaged one is
noticed and made anew.

Processes share the folder. Files appear whole; of several that want the same net one compiles and the others wait for
it. What a process that was killed left behind, the next one clears away.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dlinfer.settings import cache_folder
from dlinfer.toolchain.process import Stop

_SCRATCH = ".compiling-"
_FRESH = 60.0
"""Seconds that a scratch folder may be there without its owner's lock."""
_PAUSE = 0.1


def place() -> Path:
    """Return the folder in which nets and the logs of failures lie."""
    return cache_folder().absolute() / "sophgo"


def kept(key: str) -> Path | None:
    """Return the net of a key, if it is there and sound."""
    for path in place().glob(f"{key}-*.bmodel"):
        with contextlib.suppress(FileNotFoundError):  # another process found it damaged, and has made it anew
            if path.stem == f"{key}-{_digest(path)}":
                return path
    return None


def store(made: Path, key: str) -> Path:
    """Put a file of a scratch folder into the cache, in place of a damaged one. For who is ``alone`` with the key."""
    path = place() / f"{key}-{_digest(made)}.bmodel"
    for damaged in place().glob(f"{key}-*.bmodel"):
        damaged.unlink(missing_ok=True)
    os.replace(made, path)
    return path


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Return a folder beside the cache's files that goes at the end; locked, so that others see that it is in use."""
    _clear()
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=place()) as folder:
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(lock)


def _clear() -> None:
    """Remove scratch folders whose process is gone."""
    for folder in place().glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process may be removing it
            if time.time() - folder.stat().st_mtime < _FRESH:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def alone(key: str, stop: Stop) -> Iterator[None]:
    """Waits until no thread or process compiles this key. Raises StoppedError while it waits."""
    place().mkdir(parents=True, exist_ok=True)
    path = place() / f"{key}.lock"
    while (lock := _locked(path)) is None:
        stop.check()
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _locked(path: Path) -> int | None:
    """The open file, locked; None where another has it, or had it and has removed it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
