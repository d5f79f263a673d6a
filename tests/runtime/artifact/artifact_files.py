"""Artifacts for tests: compiled by an engine that compiles nothing, and files altered with or without their digests."""

import copy
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
from dlinfer.runtime.artifact.container import Writer, open_container
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


def archive(members: dict[str, bytes], manifest: dict[str, Any]) -> bytes:
    """An archive with right digests, whatever it holds: also numbers that are no JSON, which Writer would refuse."""
    stream = BytesIO()
    writer = Writer(stream)
    for name, contents in members.items():
        writer.add(name, [contents])
    with mock.patch.object(container, "_json", lambda data: json.dumps(data).encode()):
        writer.finish(manifest)
    return stream.getvalue()


def unpacked(data: bytes) -> tuple[dict[str, bytes], dict[str, Any]]:
    container = open_container(data, "a test")
    return {name: bytes(contents) for name, contents in container.members.items()}, container.manifest


def altered(data: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """The artifact after ``change(manifest, graph)`` of its first stage, with right digests."""
    members, manifest = unpacked(data)
    manifest = copy.deepcopy(manifest)
    place = manifest["stages"][0]["graph"]
    graph = json.loads(members[place])
    change(manifest, graph)
    return archive(members | {place: json.dumps(graph).encode()}, manifest)


def raw_zip(members: list[tuple[str, bytes]], comment: bytes = b"", **options: Any) -> bytes:
    """A zip made by Python's own writer, with any names."""
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as target:
        for name, contents in members:
            target.writestr(zipfile.ZipInfo(name), contents, compress_type=options.get("compression"))
        target.comment = comment
    return stream.getvalue()
