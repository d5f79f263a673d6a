"""Artifacts as files: what is written of compiled graphs, and what is read back, checked piece by piece.

A file holds graphs in their written form, their weights once, and what engines keep of regions. Reading unpickles
nothing and runs nothing; docs/guides/artifacts.md describes the format.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dlinfer.errors import (
    ArtifactCorruptError,
    ArtifactCpuError,
    ArtifactNotFoundError,
    ArtifactStorageError,
    ArtifactVersionError,
)
from dlinfer.graph.cache.fingerprint import cpu_flags, environment
from dlinfer.graph.cache.key import canonical_text
from dlinfer.graph.codec.arguments import CodecError, device_of, dtype_of
from dlinfer.graph.codec.graph import Layout, other_op_versions
from dlinfer.graph.ir.global_state import Requirement
from dlinfer.runtime.artifact import sealing
from dlinfer.runtime.artifact.container import Container, Writer, open_container, written_whole
from dlinfer.runtime.artifact.stored import Stage, Storable, payloads_of
from dlinfer.runtime.artifact.tensor_file import PLAIN_DTYPES, TensorFile, TensorTable

FORMAT = 2
_READ = (1, 2)  # in format 1 no two tensors share memory
_WEIGHTS = "weights.bin"


# --- writing


def save(entries: Mapping[str, Sequence[Storable]], path: str | Path, *, key: bytes | None = None) -> None:
    """Write artifacts to one file: for each entry its stages. Tensors that several of them share are written once.

    Raises ArtifactStorageError and ArtifactNotFoundError.
    """
    table = TensorTable()
    described: list[dict[str, Any]] = []
    members: list[tuple[str, Any]] = []
    for name, stages in entries.items():
        for number, artifact in enumerate(stages):
            stage = artifact.stored
            if isinstance(stage, str):
                raise ArtifactStorageError(what=f"entry {name!r}", detail=stage)
            described.append(_described(name, number, artifact, stage, table, members))
    manifest = {"format": FORMAT, "made_with": _made_with(), "stages": described, "tensors": table.listed()}
    target = Path(path)
    try:
        with written_whole(target) as stream, _sealed(stream, key) as sink:
            writer = Writer(sink)
            for name, contents in members:
                if isinstance(contents, dict):
                    writer.add_json(name, contents)
                else:
                    writer.add(name, [contents])
            writer.add(_WEIGHTS, table.chunks())
            writer.finish(manifest)
    except OSError as cause:
        raise ArtifactNotFoundError(source=str(target), detail=cause.strerror or str(cause)) from cause


def _described(
    entry: str,
    number: int,
    artifact: Storable,
    stage: Stage,
    table: TensorTable,
    members: list[tuple[str, Any]],
) -> dict[str, Any]:
    """What the manifest says of one stage; its members are added to ``members``."""
    place = f"stage_{len(members)}"
    members.append((f"{place}/graph.json", stage.graph))
    payloads = {}
    for region, payload in payloads_of(artifact.run).items():
        members.append((f"{place}/{region}.bin", payload.data))
        payloads[region] = {"member": f"{place}/{region}.bin", "cpu": list(payload.cpu)}
    engine = artifact.run.engine
    return {
        "entry": entry,
        "number": number,
        "model": stage.model,
        "engine": stage.engine,
        "engine_version": engine.payload_version(),
        "engine_options": stage.engine_options,
        "small_regions": stage.small_regions,
        "graph": f"{place}/graph.json",
        "tensors": [table.add(tensor) for tensor in stage.tensors],
        "outputs": stage.outputs,
        "requirement": artifact.run.requirement.to_dict(),
        "payloads": payloads,
    }


def _made_with() -> dict[str, Any]:
    """The environment of a key, as the caches have it, for people who ask what a file was made with."""
    return json.loads(canonical_text(environment()))


@contextlib.contextmanager
def _sealed(stream: IO[bytes], key: bytes | None) -> Iterator[Any]:
    if key is None:
        yield stream
        return
    sink = sealing.SealedWriter(stream, key)
    yield sink
    sink.close()


# --- reading


@dataclass(frozen=True)
class ReadStage:
    """One stage of a file. tensors: the numbers of its weights and constants; payloads: by region.

    requirement: what it needs of torch's settings; None in a file that says nothing of them.
    """

    entry: str
    model: str
    engine: str
    engine_version: str
    engine_options: dict[str, Any]
    small_regions: bool
    graph: Any
    tensors: tuple[int, ...]
    outputs: list[dict[str, Any] | None]
    requirement: Requirement | None
    payloads: Mapping[str, memoryview] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadArtifact:
    """A file that was checked. stages: those of each entry, in their order."""

    source: str
    stages: Mapping[str, tuple[ReadStage, ...]]
    tensors: TensorFile
    container: Container

    def layouts(self, stage: ReadStage) -> list[Layout]:
        """How the tensors of a stage lie."""
        return [self.tensors.layouts[number] for number in stage.tensors]


def read(
    origin: str | Path | bytes | bytearray | memoryview, *, key: bytes | str | None = None
) -> ReadArtifact:
    """Check an artifact from a file or from memory and read all but its weights.

    key: of 32 bytes, or the name of a registered decryption (``sealing.register_decryption``).
    Raises ArtifactNotFoundError, ArtifactCorruptError, ArtifactVersionError, ArtifactKeyError, ArtifactCpuError.
    """
    source = str(origin) if isinstance(origin, (str, Path)) else f"of {len(origin)} bytes"
    data: Any = Path(origin) if isinstance(origin, (str, Path)) else origin
    if key is not None or sealing.is_sealed(_start(data, source)):
        whole = data if not isinstance(data, Path) else _bytes(data, source)
        data = sealing.unsealed(whole, key, source)
    container = open_container(data, source)
    version = container.manifest.get("format")
    if version not in _READ:
        raise ArtifactVersionError(source=source, what="format", wanted=version, here=FORMAT)
    try:
        return _read(container)
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        if isinstance(cause, (ArtifactCorruptError, ArtifactCpuError)):
            raise
        detail = str(cause) if isinstance(cause, CodecError) else f"{type(cause).__name__}: {cause}"
        raise ArtifactCorruptError(source=source, detail=f"its manifest is not one: {detail}") from cause


def _start(data: Any, source: str) -> bytes:
    if not isinstance(data, Path):
        return bytes(memoryview(data)[:16])
    try:
        with open(data, "rb") as stream:
            return stream.read(16)
    except OSError as cause:
        raise ArtifactNotFoundError(source=source, detail=cause.strerror or str(cause)) from cause


def _bytes(path: Path, source: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise ArtifactNotFoundError(source=source, detail=cause.strerror or str(cause)) from cause


def _read(container: Container) -> ReadArtifact:
    manifest = container.manifest
    tensors = TensorFile(_layouts(manifest["tensors"]), container, _WEIGHTS)
    stages: dict[str, tuple[ReadStage, ...]] = {}
    for item in manifest["stages"]:
        stage = _stage(item, container, len(tensors.layouts))
        stages[stage.entry] = (*stages.get(stage.entry, ()), stage)
    if not stages:
        raise CodecError("it has no entry")
    return ReadArtifact(container.source, stages, tensors, container)


def _layouts(items: Any) -> list[tuple[Layout, int]]:
    found = []
    for item in items:
        numbers = [*item["sizes"], *item["strides"], item["offset"]]
        if len(item["sizes"]) != len(item["strides"]) or not all(
            type(number) is int and 0 <= number < 1 << 62 for number in numbers
        ):
            raise CodecError("a tensor whose sizes are not numbers")
        dtype = dtype_of(item["dtype"])
        if dtype not in PLAIN_DTYPES:
            raise CodecError(f"a tensor of {dtype}")
        layout = Layout(dtype, tuple(item["sizes"]), tuple(item["strides"]), device_of(item["device"]))
        found.append((layout, item["offset"]))
    return found


def _stage(item: Any, container: Container, tensors: int) -> ReadStage:
    numbers = tuple(item["tensors"])
    if not all(type(number) is int and 0 <= number < tensors for number in numbers):
        raise CodecError("a stage with a tensor that is not there")
    payloads = {}
    for region, said in item["payloads"].items():
        missing = sorted(set(said["cpu"]) - set(cpu_flags().split()))
        if missing:
            raise ArtifactCpuError(source=container.source, missing=", ".join(missing))
        payloads[region] = container.member(said["member"])
    texts = [item[name] for name in ("entry", "model", "engine", "engine_version")]
    if not all(isinstance(text, str) for text in texts):
        raise CodecError("a stage whose names are not texts")
    graph, outputs = container.json(item["graph"]), list(item["outputs"])
    for op, wanted, here in other_op_versions(graph):
        what = f"dlinfer's op {op!r} of version"
        raise ArtifactVersionError(
            source=container.source, what=what, wanted=wanted, here=here or "no such op"
        )
    entry, model, engine, version = texts
    told, small = dict(item["engine_options"]), bool(item["small_regions"])
    requirement = None if item.get("requirement") is None else Requirement.from_dict(item["requirement"])
    return ReadStage(
        entry, model, engine, version, told, small, graph, numbers, outputs, requirement, payloads
    )
