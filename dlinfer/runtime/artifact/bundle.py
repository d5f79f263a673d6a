"""Several compiled graphs in one artifact: entries by name (prefill, decode, embedding, head), their weights once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlinfer.errors import ArtifactStorageError, SessionCallError
from dlinfer.runtime.artifact.artifact import Artifact
from dlinfer.runtime.artifact.files import save


@dataclass(frozen=True)
class Bundle:
    """The result of ``dlinfer.bundle``. entries: for each name its stages, one or more shape profiles."""

    entries: Mapping[str, tuple[Artifact, ...]]

    def __getitem__(self, entry: str) -> Artifact:
        """The first stage of an entry. Raises SessionCallError."""
        if entry not in self.entries:
            raise SessionCallError(what="entry", name=entry, detail=f"it has {', '.join(self.entries)}")
        return self.entries[entry][0]

    def save(self, path: str | Path, *, key: bytes | None = None) -> None:
        """Write it to a file, as ``Artifact.save`` does; a tensor that several entries use is written once."""
        save(self.entries, path, key=key)


def bundle(entries: Mapping[str, Artifact | Sequence[Artifact]]) -> Bundle:
    """Put artifacts together: ``dlinfer.bundle({"prefill": a, "decode": b}).save(path)``.

    A sequence of artifacts is one entry with several stages: the same inputs and outputs for other sizes. A run takes
    the first stage that its inputs fit. Artifacts of one module share its weights, in the file and in a session, and
    a buffer that they write (a KV cache) is the same one for all.

    Raises ArtifactStorageError for names that are no identifiers and stages that are not alike.
    """
    stages = {name: _stages(name, artifacts) for name, artifacts in entries.items()}
    if not stages:
        raise ArtifactStorageError(what="a bundle", detail="it has no entry")
    return Bundle(stages)


def _stages(name: str, artifacts: Any) -> tuple[Artifact, ...]:
    stages = (artifacts,) if isinstance(artifacts, Artifact) else tuple(artifacts)
    if not name.isidentifier() or not name.isascii():
        raise ArtifactStorageError(what=f"entry {name!r}", detail="its name is no identifier")
    if not stages or not all(isinstance(stage, Artifact) for stage in stages):
        raise ArtifactStorageError(what=f"entry {name!r}", detail="it has no artifact of dlinfer.compile")
    interfaces = {_interface(stage) for stage in stages}
    if len(interfaces) > 1:
        raise ArtifactStorageError(what=f"entry {name!r}", detail="its stages take or give other tensors")
    return stages


def _interface(artifact: Artifact) -> object:
    """The names and dtypes of what a stage takes and gives."""
    stage = artifact.stored
    if isinstance(stage, str):
        return stage
    ports = (*stage.interface.inputs, *stage.interface.outputs)
    return tuple((port.name, port.dtype) for port in ports), tuple(stage.interface.constants), *stage.results
