"""Artifacts as files: what is written of compiled graphs, and what is read back, checked piece by piece.

A file holds graphs in their written form and their weights once. Reading unpickles
nothing and runs nothing; docs/guides/artifacts.md describes the format.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlinfer.errors import (
    ArtifactCorruptError,
    ArtifactNotFoundError,
    ArtifactStorageError,
    ArtifactVersionError,
)
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.graph.cache.key import canonical_text
from dlinfer.graph.codec.arguments import CodecError, Json, name_of, refuse_malformed
from dlinfer.graph.codec.graph import Layout, other_op_versions
from dlinfer.graph.codec.interface import read_interface
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.ir.global_state import Requirement
from dlinfer.runtime.artifact.container import (
    FORMAT,
    Container,
    Member,
    json_member,
    open_container,
    write_container,
    written_whole,
)
from dlinfer.runtime.artifact.sealing import SealedWriter
from dlinfer.runtime.artifact.stored import Stage, Storable
from dlinfer.runtime.artifact.tensor_file import TensorFile, TensorTable, read_layouts

_WEIGHTS = "weights.bin"


# --- writing


def save(entries: Mapping[str, Sequence[Storable]], path: str | Path, *, key: bytes | None = None) -> None:
    """Write artifacts to one file: for each entry its stages. Tensors that several of them share are written once.

    Raises ArtifactStorageError and ArtifactNotFoundError.
    """
    table = TensorTable()
    described: list[Json] = []
    members: dict[str, Member] = {}
    for name, stages in entries.items():
        for artifact in stages:
            stage = artifact.stored
            if isinstance(stage, str):
                raise ArtifactStorageError(what=f"entry {name!r}", detail=stage)
            place = f"stage_{len(described)}"
            described.append({"entry": name} | _described(artifact, stage, place, table, members))
    made_with = json.loads(canonical_text(environment()))  # for people who ask
    manifest = {"format": FORMAT, "made_with": made_with, "stages": described, "tensors": table.listed()}
    target = Path(path)
    try:
        with (
            written_whole(target) as stream,
            nullcontext(stream) if key is None else closing(SealedWriter(stream, key)) as sink,
        ):
            write_container(sink, manifest, {_WEIGHTS: table.member()} | members)
    except OSError as cause:
        raise ArtifactNotFoundError(source=str(target), detail=cause.strerror or str(cause)) from cause


def _described(
    artifact: Storable, stage: Stage, place: str, table: TensorTable, members: dict[str, Member]
) -> dict[str, Json]:
    """Describe one stage for the manifest; its members are added to ``members``."""
    members[f"{place}/graph.json"] = json_member(stage.graph)
    return {
        "model": stage.model,
        "engine": stage.engine,
        "engine_options": stage.engine_options,
        "small_regions": stage.small_regions,
        "graph": f"{place}/graph.json",
        "tensors": [table.add(tensor) for tensor in stage.tensors],
        "results": stage.results,
        "requirement": artifact.run.requirement.to_dict(),
    }


# --- reading


@dataclass(frozen=True)
class ReadStage:
    """One stage of a file. tensors: the numbers of its weights and constants.

    requirement: what it needs of torch's settings.
    """

    entry: str
    model: str
    engine: str
    engine_options: dict[str, Any]
    small_regions: bool
    graph: Json
    tensors: tuple[int, ...]
    interface: Interface
    results: tuple[str, ...]
    requirement: Requirement


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
    Raises ArtifactNotFoundError, ArtifactCorruptError, ArtifactVersionError, ArtifactKeyError.
    """
    source = str(origin) if isinstance(origin, (str, Path)) else f"of {len(origin)} bytes"
    container = open_container(Path(origin) if isinstance(origin, str) else origin, source, key)
    try:
        with refuse_malformed():
            return _read(container)
    except CodecError as cause:
        raise ArtifactCorruptError(source=source, detail=f"its manifest is malformed: {cause}") from cause


def _read(container: Container) -> ReadArtifact:
    manifest = container.manifest
    written = manifest["format"]
    if written != FORMAT:
        raise ArtifactVersionError(source=container.source, what="format", wanted=written, here=FORMAT)
    tensors = TensorFile(read_layouts(manifest["tensors"]), container, _WEIGHTS)
    stages: dict[str, tuple[ReadStage, ...]] = {}
    for item in manifest["stages"]:
        stage = _stage(item, container, len(tensors.layouts))
        stages[stage.entry] = (*stages.get(stage.entry, ()), stage)
    if not stages:
        raise CodecError("it has no entry")
    return ReadArtifact(container.source, stages, tensors, container)


def _stage(item: Json, container: Container, tensors: int) -> ReadStage:
    numbers = tuple(item["tensors"])
    if not all(type(number) is int and 0 <= number < tensors for number in numbers):
        raise CodecError("a stage with a tensor that is not there")
    entry, model, engine = (item[name] for name in ("entry", "model", "engine"))
    if not all(isinstance(text, str) for text in (entry, model, engine)):
        raise CodecError("a stage whose names are not texts")
    graph = container.json(item["graph"])
    for op, written, here in other_op_versions(graph):
        what = f"dlinfer's op {op!r} of version"
        raise ArtifactVersionError(
            source=container.source, what=what, wanted=written, here=here or "no such op"
        )
    return ReadStage(
        entry,
        model,
        engine,
        dict(item["engine_options"]),
        bool(item["small_regions"]),
        graph,
        numbers,
        read_interface(graph["interface"]),
        tuple(map(name_of, item["results"])),
        Requirement.from_dict(item["requirement"]),
    )
