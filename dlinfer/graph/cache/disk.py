"""The disk cache of compiled artifacts. Several processes may use it at the same time.

An entry is one file: a header line with a SHA-256 of the rest, the text of the entry's key, then the stored bytes. A
new file is written in a temporary folder and then renamed, so a reader sees a whole file or none. If the checksum is
wrong, the entry is removed, and the artifact is compiled again. If an entry cannot be opened, or the function that
reads its bytes raises an error, the failure is reported. The entry then stays until the next compilation replaces it.
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
"""The largest number of stored keys that are compared with a missing key of the same subject: the newest ones."""

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_thread = threading.local()
_warned: set[str] = set()


def counts() -> dict[str, int]:
    """Return how often each outcome of a load or a store occurred in this process: outcome -> count.

    - ``hit``, ``missed``, ``stored``, ``not stored``;
    - ``corrupt``: the checksum was wrong;
    - ``refused``: the function that reads the bytes raised an error;
    - ``not read``: the file could not be opened or read;
    - ``not used``: code on disk changed after this process loaded it.
    """
    with _lock:
        return dict(_counts)


@contextlib.contextmanager
def uncounted() -> Generator[None]:
    """Leave this thread's loads and stores in the ``with`` block out of ``counts``.

    Self-tests use it, because their loads and stores serve no user's model.
    """
    before = getattr(_thread, "uncounted", False)
    _thread.uncounted = True
    try:
        yield
    finally:
        _thread.uncounted = before


class CacheWarning(UserWarning):
    """The disk cache cannot be used, so each process compiles again."""


class MissingEntryError(LookupError):
    """An undamaged entry refers to another entry, which is missing.

    The function that reads the bytes of an entry raises this error. The load then counts as missed.
    """


class ArtifactCache:
    """A cache on disk: one folder with the entries of one kind, such as compiled graphs."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder / kind

    def load(self, key: Key, read: Callable[[bytes], T]) -> T | None:
        """Return ``read(data)`` for the bytes ``data`` that are stored under ``key``.

        Return None if no bytes are stored, if they are damaged, or if ``read`` raises an error. On a miss,
        DLINFER_DEBUG prints how ``key`` differs from the most similar stored key, field by field.
        """
        if _unusable(key):
            return None
        value = self.load_named(key.name, read)
        if value is None and wanted("cache") and not (self.folder / key.name).exists():
            why = self.why_missed(key) or "no entry with this subject is stored"
            show("cache", f"why {key.name} was missed", f"  {why}")
        return value

    def load_named(self, name: str, read: Callable[[bytes], T]) -> T | None:
        """Load an entry as ``load`` does, but by the name of its key.

        On a miss, DLINFER_DEBUG cannot print how the key differs from stored keys, because only its name is known.
        """
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
        """Store the bytes that ``write`` returns. Return False if this fails, for example on a full disk.

        Storing also fails if ``write`` raises an error.
        """
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
        """Return a text that says how ``key`` differs from the most similar stored key, field by field.

        Only stored keys with the same kind and subject are compared. The text is empty if there are none.
        """
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
    """Return the bytes that were stored under the name; None if the file is damaged. data: the content of the file."""
    header, newline, body = data.partition(b"\n")
    if not newline or header != b"%s %s" % (_MAGIC, hashlib.sha256(body).hexdigest().encode()):
        return None
    length, _, rest = body.partition(b"\n")
    key, payload = rest[: int(length)], rest[int(length) + 1 :]
    return payload if belongs(name, key.decode(errors="surrogatepass")) else None


def _stored_key(path: Path) -> str:
    """Return the text of the key in a cache file. The checksum is not checked.

    Raises ValueError if the file is no cache entry.
    """
    with path.open("rb") as file:
        if not file.readline(200).startswith(_MAGIC):
            raise ValueError("no entry")
        return file.read(int(file.readline(20))).decode(errors="surrogatepass")


def _remove(path: Path, status: os.stat_result) -> None:
    """Remove a damaged file, unless another process has replaced it since it was read.

    status: the status of the file when it was read.
    """
    with contextlib.suppress(OSError):  # if the folder cannot be written, the next reader finds it again
        if os.path.samestat(path.stat(), status):
            path.unlink()


def _unusable(key: Key) -> bool:
    """Return True, and warn, if code on disk changed after this process loaded it: the cache must not be used then."""
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
