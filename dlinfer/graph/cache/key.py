"""The key of an entry in the disk cache: named fields for everything that the entry depends on.

Entries are loops that inductor compiled, bound calls, models that an engine's own compiler built, and results of
self-tests. An entry's name is a digest of the key's canonical text. The entry also stores this text. So if a key is not
found, the cache can say how it differs from a stored key.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import cast

from dlinfer.graph.cache.fingerprint import Environment

_SUBJECT, _DIGEST = 12, 40
"""The numbers of hexadecimal digits in the two parts of a key's name."""


@dataclass(frozen=True)
class Key:
    """Everything that an entry depends on. Values are plain data: numbers, texts, None, and containers of these.

    kind: the kind of entry, such as ``cluster`` (loops compiled together) or ``call`` (a bound call).
    subject: the name of the compiled function or model. A missing key is compared with stored keys of the same subject.
    environment: versions, code and settings; see ``Environment``.
    content: the compiled graph or model, as lines of text.
    device: the device that runs the code.
    engine: the engine's name.
    engine_identity: facts that this engine's stored programs depend on, such as versions.
    engine_options: the options of the engine. options: the other options of the compilation, by name.
    disabled_passes: names of the graph passes that did not run.
    steady: names of the arguments that a bound call treats as the same object at each call.
    variant: a number that tells apart entries with equal content.
    """

    kind: str
    subject: str
    environment: Environment
    content: tuple[str, ...] = ()
    device: str = ""
    engine: str = ""
    engine_identity: object = ""
    engine_options: Mapping[str, object] = field(default_factory=dict[str, object])
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    disabled_passes: tuple[str, ...] = ()
    steady: tuple[str, ...] = ()
    variant: int = 0

    @functools.cached_property
    def text(self) -> str:
        """The canonical text of the key. Two keys are equal exactly if their texts are equal."""
        return json.dumps(_fields(self), sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    @functools.cached_property
    def name(self) -> str:
        """The file name of the entry: a digest of the subject, and a digest of the whole key."""
        return f"{self.prefix}{digest(self.text)[:_DIGEST]}"

    @property
    def prefix(self) -> str:
        """The first part of the names of all keys with this kind and subject."""
        return f"{digest(canonical_text([self.kind, self.subject]))[:_SUBJECT]}-"


def belongs(name: str, text: str) -> bool:
    return name.rpartition("-")[2] == digest(text)[:_DIGEST]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def canonical_text(value: object) -> str:
    """Return plain data as text. Two data that differ in value or type, such as 1 and 1.0, have different texts."""
    return json.dumps(_canonical(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _fields(value: Key | Environment) -> dict[str, object]:
    return {item.name: _canonical(getattr(value, item.name)) for item in fields(value)}


def _canonical(value: object) -> object:
    """Return a value as data for JSON.

    A dict with text keys stays a dict. Other containers and objects become lists that begin with their kind.
    """
    if isinstance(value, Environment):
        return _fields(value)
    kind = type(value).__name__
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        if all(type(name) is str for name, _ in pairs):
            return {str(name): _canonical(item) for name, item in pairs}
        return ["dict", *sorted(([_canonical(k), _canonical(v)] for k, v in pairs), key=json.dumps)]
    if isinstance(value, (set, frozenset, list, tuple)):
        items = [_canonical(item) for item in cast("Iterable[object]", value)]
        return [kind, *items] if kind in ("list", "tuple") else ["set", *sorted(items, key=json.dumps)]
    # An object whose repr has its address differs in each process, so its entry is never found again.
    return ["object", f"{type(value).__module__}.{type(value).__qualname__}", repr(value)]


# --- how two keys differ


def differences(stored: str, needed: str) -> list[str]:
    """Return the differences between the canonical texts of two keys: one text for each field that differs.

    Such a text is ``environment.threads: 4 is stored, 2 is wanted``.
    """
    return [
        f"{name}: {_shown(old, new)} is stored, {_shown(new, old)} is wanted"
        for name, old, new in _differing("", json.loads(stored), json.loads(needed))
    ]


_ABSENT = object()
_LONG = 100


def _differing(name: str, old: object, new: object) -> Iterator[tuple[str, object, object]]:
    if _same(old, new):
        return
    if isinstance(old, dict) and isinstance(new, dict):
        before, after = cast("dict[str, object]", old), cast("dict[str, object]", new)
        for key in sorted({*before, *after}):
            inner = f"{name}.{key}" if name else key
            yield from _differing(inner, before.get(key, _ABSENT), after.get(key, _ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and old[:1] == new[:1]:
        before, after = cast("list[object]", old), cast("list[object]", new)
        pairs = (pair for pair in zip(before, after, strict=False) if not _same(*pair))
        first = next(pairs, (f"{len(before) - 1} items", f"{len(after) - 1} items"))
        yield name, first[0], first[1]
    else:
        yield name, old, new


def _same(old: object, new: object) -> bool:
    """Return whether two values have the same JSON text. The texts of 1, 1.0 and True all differ."""
    return old is new or json.dumps(old, sort_keys=True, default=id) == json.dumps(
        new, sort_keys=True, default=id
    )


def _shown(value: object, other: object) -> str:
    """Return a value as text for people. A long text is reduced to the words that ``other`` lacks."""
    if value is _ABSENT:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and isinstance(other, str) and len(text) > _LONG:
        known = set(other.split())
        text = f"... {' '.join(word for word in text.split() if word not in known)} ..."
    if not text:
        return "an empty text"
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
