"""Write and read artifact files. A file holds the stages as JSON, and each weight once.

The reader checks every part. It unpickles nothing and runs no code of the file. docs/guides/artifacts.md describes the
format.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

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
from dlinfer.graph.ir.global_state import Requirement
from dlinfer.runtime.artifact.container import (
    FORMAT,
    Container,
    Member,
    json_bytes,
    open_container,
    write_container,
    written_whole,
)
from dlinfer.runtime.artifact.sealing import Buffer, SealedWriter
from dlinfer.runtime.artifact.stage import Stage
from dlinfer.runtime.artifact.tensor_file import TensorFile, TensorTable, read_layouts

_WEIGHTS = "weights.bin"


def save(
    entries: Mapping[str, Sequence[Stage[torch.Tensor] | str]], path: str | Path, key: bytes | None
) -> None:
    """Write entries and their stages to one file. Tensors that several stages share are written once.

    entries: name of an entry -> its stages. A text in place of a stage is the reason why the stage cannot be stored.

    Raises ArtifactStorageError for such a text, and for a tensor that cannot be stored. Raises ArtifactNotFoundError if
    the file cannot be written.
    """
    table = TensorTable()
    manifest_stages: list[Json] = []
    graphs: dict[str, bytes] = {}
    for entry, stages in entries.items():
        for stage in stages:
            if isinstance(stage, str):
                raise ArtifactStorageError(what=f"entry {entry!r}", detail=stage)
            place = f"stage_{len(graphs)}/graph.json"
            graphs[place] = json_bytes(stage.graph)
            item: dict[str, Json] = {
                "entry": entry,
                "model": stage.model,
                "engine": stage.engine,
                "engine_options": stage.engine_options,
                "small_regions": stage.small_regions,
                "eager_ops": stage.eager_ops,
                "requirement": stage.requirement.to_dict(),
                "graph": place,
                "tensors": [table.add(tensor) for tensor in stage.tensors],
                "results": stage.results,
            }
            manifest_stages.append(item)
    offsets = table.offsets()
    manifest = {
        "format": FORMAT,
        "made_with": json.loads(canonical_text(environment())),  # for people only: the reader ignores it
        "stages": manifest_stages,
        "tensors": table.layouts(offsets),
    }
    members: dict[str, Member | bytes] = {_WEIGHTS: table.member(offsets), **graphs}
    target = Path(path)
    try:
        with (
            written_whole(target) as stream,
            nullcontext(stream) if key is None else closing(SealedWriter(stream, key)) as sink,
        ):
            write_container(sink, manifest, members)
    except OSError as cause:
        raise ArtifactNotFoundError(source=str(target), detail=cause.strerror or str(cause)) from cause


@dataclass(frozen=True)
class ReadArtifact:
    """An artifact from a file that was checked. stages: name of an entry -> its stages, in order."""

    stages: Mapping[str, Sequence[Stage[int]]]
    tensors: TensorFile

    @property
    def source(self) -> str:
        return self.tensors.container.source

    def layouts(self, stage: Stage[int]) -> list[Layout]:
        return [self.tensors.layouts[number] for number in stage.tensors]


def read(origin: str | Path | Buffer, *, key: bytes | str | None = None) -> ReadArtifact:
    """Check an artifact, in a file or in memory, and read all of it but the weights.

    key: 32 bytes, or the name of a registered decryption (``sealing.register_decryption``).
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
    stages: dict[str, list[Stage[int]]] = {}
    for item in manifest["stages"]:
        stage = _read_stage(item, container, len(tensors.layouts))
        stages.setdefault(stage.entry, []).append(stage)
    if not stages:
        raise CodecError("it has no entries")
    return ReadArtifact(stages, tensors)


def _read_stage(item: Json, container: Container, tensors: int) -> Stage[int]:
    numbers = tuple(item["tensors"])
    if not all(type(number) is int and 0 <= number < tensors for number in numbers):
        raise CodecError("a stage uses a tensor that is missing")
    entry, model, engine = (item[name] for name in ("entry", "model", "engine"))
    eager_ops = tuple(item["eager_ops"])
    if not all(isinstance(text, str) for text in (entry, model, engine, *eager_ops)):
        raise CodecError("a stage has a name that is not text")
    graph = container.json(item["graph"])
    for op, written, here in other_op_versions(graph):
        what = f"dlinfer's op {op!r} in version"
        raise ArtifactVersionError(
            source=container.source, what=what, wanted=written, here=here or "no such op"
        )
    interface, results = read_interface(graph["interface"]), tuple(map(name_of, item["results"]))
    inputs, outputs = ([port.name for port in ports] for ports in (interface.inputs, interface.outputs))
    if len(set(inputs)) < len(inputs) or len(set(results)) < len(results):
        raise CodecError("two inputs or two outputs have the same name")
    if [name for name in results if name in outputs] != outputs:
        raise CodecError("an output is not among the results")
    return Stage(
        model,
        engine,
        dict(item["engine_options"]),
        bool(item["small_regions"]),
        eager_ops,
        Requirement.from_dict(item["requirement"]),
        graph,
        numbers,
        interface,
        results,
        entry,
    )
