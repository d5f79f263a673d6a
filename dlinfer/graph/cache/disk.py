"""The disk cache of compiled artifacts: by fingerprint, checked on reading, safe for several processes.

An entry is one file: a header line with the SHA-256 of what follows and the fingerprint it was stored under, then
the engine's bytes. It appears whole or not at all (written beside and renamed). One that is truncated, altered or
stored under another fingerprint is removed and made anew, and counted.
"""

import contextlib
import hashlib
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dlinfer.graph.cache.fingerprint import environment
from dlinfer.graph.report import debug

T = TypeVar("T")
_MAGIC = b"dlinfer-artifact-1"

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def counts() -> dict[str, int]:
    """How often in this process an entry was ``hit``, ``missed``, ``stored``, ``corrupt`` or ``not stored``."""
    with _lock:
        return dict(_counts)


def _count(what: str) -> None:
    with _lock:
        _counts[what] += 1


class MissingEntryError(LookupError):
    """A sound entry needs another one that is not there."""


class ArtifactCache:
    """Entries of one kind in one folder. The versions and the CPU are part of every fingerprint."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder / kind
        self.kind = kind

    def fingerprint(self, key: str) -> str:
        """What ``key`` means on this machine with these versions."""
        return hashlib.sha256(f"{self.kind}\n{key}\n{environment()}".encode()).hexdigest()[:40]

    def load(self, key: str, read: Callable[[str], T]) -> T | None:
        """What ``read`` makes of the file that was stored under ``key``; None where there is no sound one."""
        name = self.fingerprint(key)
        path = self.folder / name
        try:
            data = path.read_bytes()
        except OSError:
            _count("missed")
            debug.show("cache", "missed", f"  {path}")
            return None
        payload = _checked(data, name)
        if payload is not None:
            try:
                with tempfile.TemporaryDirectory(prefix="dlinfer-") as scratch:
                    copy = Path(scratch) / "payload"
                    copy.write_bytes(payload)
                    value = read(str(copy))
            except MissingEntryError:
                _count("missed")
                debug.show("cache", "missed a part", f"  {path}")
                return None
            except Exception:  # noqa: BLE001 - the engine's reader judges its own bytes; any refusal means: make it anew
                payload = None
            else:
                _count("hit")
                debug.show("cache", "hit", f"  {path}")
                return value
        _count("corrupt")
        debug.show("cache", "corrupt, made anew", f"  {path}")
        with contextlib.suppress(
            OSError
        ):  # in a folder that cannot be written it is met and passed over again
            path.unlink()
        return None

    def store(self, key: str, value: Any, write: Callable[[Any, str], None]) -> bool:
        """Keep ``value``; False where it cannot be written (a full disk, an artifact torch cannot save)."""
        name = self.fingerprint(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self.folder) as scratch:
                plain = Path(scratch) / "payload"
                write(value, str(plain))
                payload = plain.read_bytes()
                whole = Path(scratch) / "entry"
                whole.write_bytes(_header(payload, name) + payload)
                os.replace(whole, self.folder / name)
        except Exception:  # noqa: BLE001 - a cache that cannot keep something costs time, not results
            _count("not stored")
            debug.show("cache", "not stored", f"  {self.folder / name}")
            return False
        _count("stored")
        debug.show("cache", "stored", f"  {self.folder / name}")
        return True


def _header(payload: bytes, name: str) -> bytes:
    return b" ".join([_MAGIC, hashlib.sha256(payload).hexdigest().encode(), name.encode()]) + b"\n"


def _checked(data: bytes, name: str) -> bytes | None:
    header, newline, payload = data.partition(b"\n")
    return payload if newline and header + b"\n" == _header(payload, name) else None
