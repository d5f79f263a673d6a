"""Results of self-tests in the disk cache: one small file each, keyed by everything that the result depends on.

A damaged file counts as missing, so the case runs again.
"""

import json
from dataclasses import asdict
from typing import Any

from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.graph.cache.key import Key
from dlinfer.graph.selftest.case import Result
from dlinfer.settings import cache_folder

FOLDER = "selftest"


def key_of(owner: str, depends_on: Any, name: str, precision: str) -> Key:
    """The key of a result: the owner with its version, the case, and the environment with the CPU."""
    return Key(
        kind="self-test",
        subject=f"{name} in {precision}",
        environment=environment(),
        engine=owner,
        engine_identity=depends_on,
    )


def load(key: Key) -> Result | None:
    """The stored result; None where there is no intact one."""
    return _cache().load(key, _read)


def save(key: Key, result: Result) -> None:
    """Store a result. If the folder cannot be written, the next process runs the case again."""
    _cache().store(key, lambda: json.dumps(asdict(result)).encode())


def _cache() -> ArtifactCache:
    return ArtifactCache(cache_folder(), FOLDER)


def _read(contents: bytes) -> Result:
    fields: dict[str, Any] = json.loads(contents)
    return Result(**{**fields, "covers": tuple(fields["covers"])})
