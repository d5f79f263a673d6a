"""Verdicts in the disk cache, one small entry each, under everything that they depend on.

A damaged entry is like one that is not there: the answer is asked for again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.graph.cache.key import Key
from dlinfer.graph.selftest.answer import Verdict
from dlinfer.settings import cache_folder


def key_of(owner: str, depends_on: Any, name: str, precision: str) -> Key:
    """What a verdict depends on: the owner with its version, the answer, and the environment, the CPU among it."""
    return Key(
        kind="known answer",
        subject=f"{name} in {precision}",
        environment=environment(),
        engine=owner,
        engine_identity=depends_on,
    )


def load(key: Key) -> Verdict | None:
    """The stored verdict; None where there is no sound one."""
    return _cache().load(key, _read)


def keep(key: Key, verdict: Verdict) -> None:
    """Store a verdict; where the folder cannot be written, the next process asks again."""
    _cache().store(key, lambda: json.dumps(asdict(verdict)).encode())


def _cache() -> ArtifactCache:
    return ArtifactCache(cache_folder(), "known_answers")


def _read(contents: bytes) -> Verdict:
    fields: Mapping[str, Any] = json.loads(contents)
    return Verdict(**{**fields, "decides": tuple(fields["decides"])})
