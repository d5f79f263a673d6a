"""The cache folder of compiled nets: files ``<key>-<digest of the content>.bmodel``. Damaged files are compiled again.

Processes share the folder. A file appears there only when it is complete. If several processes need the same net, one
of them compiles it and the others wait. If a process is killed, the next process that compiles removes its temporary
files."""

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
"""A scratch folder younger than this many seconds is not removed, because its owner may not have locked it yet."""
_PAUSE = 0.1


def place() -> Path:
    """Return the folder of compiled nets and of the logs of failed compilations."""
    return cache_folder().absolute() / "sophgo"


def kept(key: str) -> Path | None:
    """Return the compiled net with this key; None if its file is missing or damaged."""
    for path in place().glob(f"{key}-*.bmodel"):
        with contextlib.suppress(FileNotFoundError):  # another process has replaced a damaged file
            if path.stem == f"{key}-{_digest(path)}":
                return path
    return None


def store(net: Path, key: str) -> Path:
    """Move a compiled net from a scratch folder into the cache. The caller must be in ``alone(key)``."""
    path = place() / f"{key}-{_digest(net)}.bmodel"
    for damaged in place().glob(f"{key}-*.bmodel"):
        damaged.unlink(missing_ok=True)
    os.replace(net, path)
    return path


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder in the cache folder. A lock keeps other processes from removing it."""
    _clear()
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=place()) as folder, _opened(folder) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(folder)


def _clear() -> None:
    """Remove the scratch folders whose owners have ended."""
    for folder in place().glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process may be removing it
            if time.time() - folder.stat().st_mtime >= _FRESH:
                with _opened(folder) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: str | Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def alone(key: str, stop: Stop) -> Iterator[None]:
    """Hold the lock of this key during the ``with`` block. Wait while another thread or process holds it.

    stop: ends the wait, which then raises StoppedError."""
    place().mkdir(parents=True, exist_ok=True)
    path = place() / f"{key}.lock"
    while True:
        with _opened(path, os.O_RDWR | os.O_CREAT) as lock:
            if _locked(lock, path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        stop.check()
        time.sleep(_PAUSE)


def _locked(lock: int, path: Path) -> bool:
    """Lock an open file. Return False if another process holds its lock, or has removed the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
