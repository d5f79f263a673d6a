"""The disk cache of compiled artifacts: entries by key, checked on reading, safe for several processes.

An entry is one file: a header line with a SHA-256 of the rest, the text of its key, then the engine's bytes. The file
is written elsewhere and renamed, so readers see it whole or not at all. An entry with a wrong checksum is removed, and
its artifact is compiled again. An entry that cannot be opened, or that the engine's reader refuses, is reported and
stays until the next compilation replaces it.
"""

import contextlib
import hashlib
import os
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

from dlinfer.graph.cache.key import Key, belongs, differences
from dlinfer.graph.cache.sources import CodeChangedError
from dlinfer.graph.debug import show, wanted

T = TypeVar("T")
_MAGIC = b"dlinfer-artifact-2"
_COMPARED = 20
"""The most stored keys that are compared with a missing key. They have the same subject; the newest come first."""

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_thread = threading.local()
_warned: set[str] = set()


def counts() -> dict[str, int]:
    """Return outcome -> how often it occurred in this process.

    The outcomes: ``hit``, ``missed``, ``corrupt``, ``refused`` by the reader, ``not read``, ``stored``, ``not stored``,
    and ``not used`` because the code on disk changed after this process loaded it.
    """
    with _lock:
        return dict(_counts)


@contextlib.contextmanager
def uncounted() -> Generator[None]:
    """Keep loads and stores of this thread in the ``with`` block out of ``counts``, as they serve no user's model."""
    before = getattr(_thread, "uncounted", False)
    _thread.uncounted = True
    try:
        yield
    finally:
        _thread.uncounted = before


class CacheWarning(UserWarning):
    """The disk cache cannot be used, so each process compiles again."""


class MissingEntryError(LookupError):
    """A sound entry needs another entry that is missing. A reader raises this, and the load counts as missed."""


class ArtifactCache:
    """A cache on disk: one folder with the entries of one kind, such as compiled graphs."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder / kind

    def load(self, key: Key, read: Callable[[bytes], T]) -> T | None:
        """Return ``read(bytes)`` for the bytes stored under ``key``; None if no readable entry is stored.

        On a miss, DLINFER_DEBUG prints how the key of the nearest entry differs.
        """
        if _unusable(key):
            return None
        value = self.load_named(key.name, read)
        if value is None and wanted("cache") and not (self.folder / key.name).exists():
            why = self.why_missed(key) or "no entry with this subject is stored"
            show("cache", f"why {key.name} was missed", f"  {why}")
        return value

    def load_named(self, name: str, read: Callable[[bytes], T]) -> T | None:
        """Load an entry as ``load`` does, but by its key's name. A miss prints nothing of the nearest entry."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return _note("missed", path)
        except OSError as error:
            return _note("not read", path, error)
        payload = _payload(data, name)
        if payload is None:
            _remove(path, status)
            return _note("corrupt", path)
        try:
            value = read(payload)
        except MissingEntryError as error:
            return _note("missed", path, error)
        except OSError as error:
            return _note("not read", path, error)
        except Exception as error:  # noqa: BLE001 - the engine's reader may raise anything; the entry is compiled again
            return _note("refused", path, error)
        _note("hit", path)
        return value

    def store(self, key: Key, write: Callable[[], bytes]) -> bool:
        """Store the bytes that ``write`` returns. Return False if this fails: a full disk, an error in ``write``."""
        if _unusable(key):
            return False
        path = self.folder / key.name
        try:
            entry = _entry(key.text.encode(errors="surrogatepass"), write())
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self.folder) as scratch:
                whole = Path(scratch) / "entry"
                whole.write_bytes(entry)
                os.replace(whole, path)
        except Exception as error:  # noqa: BLE001 - a cache that cannot keep something costs time, not results
            _note("not stored", path, error)
            return False
        _note("stored", path)
        return True

    def why_missed(self, key: Key) -> str:
        """Return how the nearest stored key differs, field by field; empty if no key of this subject is stored."""
        entries: list[tuple[int, Path]] = []
        with contextlib.suppress(OSError):
            entries = [(path.stat().st_mtime_ns, path) for path in self.folder.glob(f"{key.prefix}*")]
        nearest: list[str] | None = None
        for _, path in sorted(entries, reverse=True)[:_COMPARED]:
            with contextlib.suppress(OSError, ValueError):
                text = _stored_key(path)
                here = differences(text, key.text) or ["nothing differs: the entry was stored meanwhile"]
                nearest = here if nearest is None or len(here) < len(nearest) else nearest
        return "; ".join(nearest or ())


def _entry(key: bytes, payload: bytes) -> bytes:
    body = b"%d\n%s\n%s" % (len(key), key, payload)
    return b"%s %s\n%s" % (_MAGIC, hashlib.sha256(body).hexdigest().encode(), body)


def _payload(data: bytes, name: str) -> bytes | None:
    """Return the bytes that were stored under this name; None if the file is damaged. data: the whole file."""
    header, newline, body = data.partition(b"\n")
    if not newline or header != b"%s %s" % (_MAGIC, hashlib.sha256(body).hexdigest().encode()):
        return None
    length, _, rest = body.partition(b"\n")
    key, payload = rest[: int(length)], rest[int(length) + 1 :]
    return payload if belongs(name, key.decode(errors="surrogatepass")) else None


def _stored_key(path: Path) -> str:
    """Return the key's text in a cache file, without a check of the checksum. Raises ValueError for another file."""
    with path.open("rb") as file:
        if not file.readline(200).startswith(_MAGIC):
            raise ValueError("no entry")
        return file.read(int(file.readline(20))).decode(errors="surrogatepass")


def _remove(path: Path, status: os.stat_result) -> None:
    """Remove a damaged file, unless another process has replaced it since. status: that of the file that was read."""
    with contextlib.suppress(OSError):  # if the folder cannot be written, the next reader finds it again
        if os.path.samestat(path.stat(), status):
            path.unlink()


def _unusable(key: Key) -> bool:
    """Return whether code on disk changed after this process loaded it. If so, warn: the cache must not be used."""
    change = key.environment.changed
    if change:
        _note("not used", Path(key.kind), CodeChangedError(change))
        _warn(
            f"dlinfer's disk cache is off in this process: {change}. Restart the process to use the "
            "cache again.",
            stacklevel=4,
        )
    return bool(change)


def _note(outcome: str, path: Path, error: Exception | None = None) -> None:
    """Count the outcome of a load or a store, and print it under DLINFER_DEBUG. Warn of each OSError once."""
    if not getattr(_thread, "uncounted", False):
        with _lock:
            _counts[outcome] += 1
    show("cache", outcome, f"  {path}" + (f"\n  {type(error).__name__}: {error}" if error else ""))
    if isinstance(error, OSError):
        reason = f"an entry of dlinfer's disk cache was {outcome}, so it is compiled again at each start"
        _warn(f"{reason}: {error.strerror or error} ({error.filename or path})", stacklevel=5)


def _warn(text: str, stacklevel: int) -> None:
    with _lock:
        known = text in _warned
        _warned.add(text)
    if not known:
        warnings.warn(text, CacheWarning, stacklevel=stacklevel)
