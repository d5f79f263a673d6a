"""Artifacts for tests: compiled by an engine that compiles nothing, and files altered with or without their digests."""

import copy
import hashlib
import json
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.export import Dim

import dlinfer
from dlinfer.runtime.artifact import container
from dlinfer.runtime.artifact.artifact import Artifact
from dlinfer.runtime.artifact.container import open_container, write_container
from tests.graph.compiling import StubEngine

ROWS = Dim("rows", min=1, max=16)


class Stub(StubEngine):
    """Nodes one by one, by torch; threads may run them at once."""

    concurrent = True


def use_stub(monkeypatch: pytest.MonkeyPatch, engine: Any = None) -> Any:
    """Let every compilation and every load of this test find ``engine``, or a new stub."""
    found = engine or Stub()
    for place in ("runtime.aot", "runtime.artifact.loading", "graph.backend"):
        monkeypatch.setattr(f"dlinfer.{place}.find_engine", lambda name, device: found)
    return found


class Head(nn.Module):
    """Two inputs, one of them optional, and a dict of results."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 4)

    def forward(self, x, scale=None):
        y = self.linear(self.norm(x))
        return {"logits": y if scale is None else y * scale, "best": y.argmax(-1)}


class Keeps(nn.Module):
    """Writes rows into a buffer, as a KV cache is written."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.register_buffer("cache", torch.zeros(16, 8))

    def forward(self, x, slots):
        self.cache.index_copy_(0, slots, self.linear(x))
        return self.cache.sum(0)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def wanted(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """What ``Head`` gives for ``rows(count, seed)``."""
    return Head().eval()(rows(count, seed))


def compiled_head(**options: Any) -> tuple[Head, Artifact]:
    """A Head and its artifact for 1 to 16 rows."""
    head = Head().eval()
    return head, dlinfer.compile(head, (rows(5),), dynamic_shapes={"x": {0: ROWS}}, **options)


def saved(artifact: Any, path: Path, **options: Any) -> Path:
    artifact.save(path, **options)
    return path


def same(given: Any, wanted: Any) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-6)


# --- altering files


def archive(members: dict[str, bytes], manifest: Any) -> bytes:
    """A container with right digests, whatever it holds: also numbers that are no JSON."""
    stream = BytesIO()
    with mock.patch.object(container, "json_bytes", lambda data: json.dumps(data).encode()):
        write_container(stream, manifest, members)
    return stream.getvalue()


def unpacked(data: bytes) -> tuple[dict[str, bytes], Any]:
    """Members and manifest."""
    opened = open_container(data, "a test")
    members = {name: bytes(contents) for name, contents in opened.members.items()}
    del members[container.MANIFEST]
    return members, opened.manifest


def altered(data: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """The artifact after ``change(manifest, graph)`` of its first stage, with right digests."""
    members, manifest = unpacked(data)
    manifest = copy.deepcopy(manifest)
    place = manifest["stages"][0]["graph"]
    graph = json.loads(members[place])
    change(manifest, graph)
    return archive(members | {place: json.dumps(graph).encode()}, manifest)


def forged(members: list[tuple[str, bytes]], header: Callable[[Any], Any] | None = None) -> bytes:
    """A container with any names and a header that says anything, with right digests of these."""
    entries: Any = {}
    offset = 0
    digested = [b"", *(contents for _, contents in members)]
    for name, contents in [*members, ("digests.bin", bytes(32 * len(digested)))]:
        entries[name] = {
            "dtype": "U8",
            "shape": [len(contents)],
            "data_offsets": [offset, offset + len(contents)],
        }
        offset += len(contents)
    digested[0] = json.dumps(entries if header is None else header(entries)).encode()
    digests = b"".join(hashlib.sha256(part).digest() for part in digested)
    body = b"".join(digested[1:])
    return len(digested[0]).to_bytes(8, "little") + digested[0] + body + digests


def old_archive(manifest: str = '{"format":2}') -> bytes:
    """What dlinfer 0.4 wrote begins so: a zip whose comment is the digest of its manifest."""
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        target.writestr("manifest.json", manifest)
        target.comment = f"dlinfer-artifact {hashlib.sha256(manifest.encode()).hexdigest()}".encode()
    return stream.getvalue()
