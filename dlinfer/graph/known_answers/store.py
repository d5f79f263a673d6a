"""Verdicts on disk, one small file each, under everything that they depend on.

A file is a line with the SHA-256 of what follows, then JSON. It appears whole or not at all, and one that is damaged is
like one that is not there: the answer is asked for again. These are no compiled artifacts, and do not count as such.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from dlinfer.graph.fingerprint import environment, forced_isa
from dlinfer.graph.known_answers.answer import Verdict
from dlinfer.settings import cache_folder


def path_of(owner: str, name: str, precision: str) -> Path:
    """Where the verdict on a known answer lies: by owner with its version, answer, CPU, ISA in force and dlinfer."""
    key = "\n".join([owner, name, precision, environment(), forced_isa()])
    return cache_folder() / "known_answers" / hashlib.sha256(key.encode()).hexdigest()[:40]


def load(path: Path) -> Verdict | None:
    """The verdict in a file; None where there is no sound one."""
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
        if digest != _digest(body):
            return None
        fields = json.loads(body)
        return Verdict(**fields | {"decides": tuple(fields["decides"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(path: Path, verdict: Verdict) -> None:
    """Write a verdict; where the folder cannot be written, the next process asks again."""
    body = json.dumps(asdict(verdict)).encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            file.write(_digest(body) + b"\n" + body)
        os.replace(file.name, path)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()
