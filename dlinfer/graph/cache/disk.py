"""The disk cache of compiled artifacts: by key, checked on reading, safe for several processes.

An entry is one file: a header line with a SHA-256 of what follows, the text of its key, then the engine's bytes. It
appears whole or not at all (written beside and renamed). One that is proven damaged, by its checksum, is removed and
made anew. Whatever else keeps an entry from being used (a full or read-only temporary folder, a reader that refuses
it) is said, and leaves the entry where it is: what is made anew takes its place.
"""

import contextlib
import hashlib
import os
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dlinfer.graph.cache.key import Key, belongs, differences
from dlinfer.graph.report import debug

T = TypeVar("T")
_MAGIC = b"dlinfer-artifact-2"
_COMPARED = 20
"""How many stored entries of a subject are compared with a key that is not found, the newest first."""

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_apart = threading.local()
_warned: set[str] = set()


def counts() -> dict[str, int]:
    """How often in this process an entry was ``hit``, ``missed``, ``corrupt``, ``refused`` by its reader, ``not read``,
    ``stored`` or ``not stored``, and ``not used`` since nobody knows what code this process runs."""
    with _lock:
        return dict(_counts)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """What this thread loads and stores is nobody's model: ``counts`` says nothing of it."""
    before = getattr(_apart, "uncounted", False)
    _apart.uncounted = True
    try:
        yield
    finally:
        _apart.uncounted = before


class CacheWarning(UserWarning):
    """The disk cache cannot be used as it should be: what it would have saved is compiled at each start."""


class MissingEntryError(LookupError):
    """A sound entry needs another one that is not there."""


class ArtifactCache:
    """Entries of one kind in one folder."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder / kind
        self.kind = kind

    def load(self, key: Key, read: Callable[[str], T]) -> T | None:
        """What ``read`` makes of the file that was stored under ``key``; None where there is no sound one.

        Of an entry that is not there, DLINFER_DEBUG says in what the nearest one differs.
        """
        if _unusable(key):
            return None
        value = self.load_named(key.name, read)
        if value is None and debug.wanted("cache") and not (self.folder / key.name).exists():
            why = self.why_missed(key) or "nothing of it is stored"
            debug.show("cache", f"why {key.name} was missed", f"  {why}")
        return value

    def load_named(self, name: str, read: Callable[[str], T]) -> T | None:
        """``load``, by the name of the key."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                identity = os.fstat(file.fileno())
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return _passed_over("missed", path)
        except OSError as error:
            return _passed_over("not read", path, error)
        payload = _payload(data, name)
        if payload is None:
            _remove(path, identity)
            return _passed_over("corrupt", path)
        try:
            with tempfile.TemporaryDirectory(prefix="dlinfer-") as scratch:
                copy = Path(scratch) / "payload"
                copy.write_bytes(payload)
                value = read(str(copy))
        except MissingEntryError as error:
            return _passed_over("missed", path, error)
        except OSError as error:
            return _passed_over("not read", path, error)
        except Exception as error:  # noqa: BLE001 - the engine's reader judges; a refusal means: make it anew
            return _passed_over("refused", path, error)
        _note("hit", path)
        return value

    def store(self, key: Key, value: Any, write: Callable[[Any, str], None]) -> bool:
        """Keep ``value``; False where it cannot be written (a full disk, an artifact torch cannot save)."""
        if _unusable(key):
            return False
        path = self.folder / key.name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self.folder) as scratch:
                plain = Path(scratch) / "payload"
                write(value, str(plain))
                whole = Path(scratch) / "entry"
                whole.write_bytes(_entry(key.text.encode(errors="surrogatepass"), plain.read_bytes()))
                os.replace(whole, path)
        except Exception as error:  # noqa: BLE001 - a cache that cannot keep something costs time, not results
            _passed_over("not stored", path, error)
            return False
        _note("stored", path)
        return True

    def why_missed(self, key: Key) -> str:
        """In which fields the stored key nearest to this one differs; empty where none of its subject is stored."""
        found = []
        with contextlib.suppress(OSError):
            found = [(path.stat().st_mtime_ns, path) for path in self.folder.glob(f"{key.prefix}*")]
        nearest: list[str] | None = None
        for _, path in sorted(found, reverse=True)[:_COMPARED]:
            with contextlib.suppress(OSError, ValueError):
                text = _stored_key(path)
                here = differences(text, key.text) or ["nothing differs: it was stored meanwhile"]
                nearest = here if nearest is None or len(here) < len(nearest) else nearest
        return "; ".join(nearest or ())


def _entry(key: bytes, payload: bytes) -> bytes:
    body = b"%d\n%s\n%s" % (len(key), key, payload)
    return b"%s %s\n%s" % (_MAGIC, hashlib.sha256(body).hexdigest().encode(), body)


def _payload(data: bytes, name: str) -> bytes | None:
    """What was stored under this name; None where the file is not what was written."""
    header, newline, body = data.partition(b"\n")
    if not newline or header != b"%s %s" % (_MAGIC, hashlib.sha256(body).hexdigest().encode()):
        return None
    length, _, rest = body.partition(b"\n")
    key, payload = rest[: int(length)], rest[int(length) + 1 :]
    return payload if belongs(name, key.decode(errors="surrogatepass")) else None


def _stored_key(path: Path) -> str:
    """The text of an entry's key, unchecked. Raises ValueError where there is none."""
    with path.open("rb") as file:
        if not file.readline(200).startswith(_MAGIC):
            raise ValueError("no entry")
        return file.read(int(file.readline(20))).decode(errors="surrogatepass")


def _remove(path: Path, identity: os.stat_result) -> None:
    """Remove a damaged file, but not what another process has put in its place since it was read."""
    with contextlib.suppress(OSError):  # in a folder that cannot be written it is met and passed over again
        if os.path.samestat(path.stat(), identity):
            path.unlink()


def _unusable(key: Key) -> bool:
    """Whether nobody knows what code this process runs, so that it may neither take nor store anything."""
    if key.environment.changed:
        _note("not used", Path(key.kind), key.environment.changed)
        _warn(f"this process uses no cache of dlinfer's: {key.environment.changed}", stacklevel=4)
    return bool(key.environment.changed)


def _passed_over(what: str, path: Path, why: BaseException | None = None) -> None:
    """Count an entry that is of no use, and say why; loudly, once a reason, where the machine is to blame."""
    _note(what, path, "" if why is None else f"{type(why).__name__}: {why}")
    if isinstance(why, OSError):
        reason = f"an entry of dlinfer's cache was {what}, and is compiled at each start"
        _warn(f"{reason}: {why.strerror or why} ({why.filename or path})", stacklevel=5)


def _warn(text: str, stacklevel: int) -> None:
    with _lock:
        known = text in _warned
        _warned.add(text)
    if not known:
        warnings.warn(text, CacheWarning, stacklevel=stacklevel)


def _note(what: str, path: Path, why: str = "") -> None:
    if not getattr(_apart, "uncounted", False):
        with _lock:
            _counts[what] += 1
    debug.show("cache", what, f"  {path}" + (f"\n  {why}" if why else ""))
