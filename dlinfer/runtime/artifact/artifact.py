"""Artifacts in memory. An Artifact is a compiled graph and its weights, called like the module.

A Bundle holds several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dlinfer.errors import ArtifactInputError, ArtifactStorageError, SessionCallError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.report.report import GraphReport
from dlinfer.runtime.artifact.files import save
from dlinfer.runtime.artifact.stage import Stage

_SAME_CALL = "pass the same positional and keyword arguments as at the compilation."


@dataclass
class Artifact:
    """The result of ``dlinfer.compile``.

    It shares the module's weights, but copies those that torch holds lazily conjugated or negated.

    interface: one port for each tensor or number in the arguments (args, kwargs), and one for each output. A port
        describes name, dtype, sizes and device.
    stored: the graph and its weights in the form that ``save`` writes. If the artifact cannot be saved, a text with the
        reason.
    """

    run: CompiledGraph
    weights: Sequence[torch.Tensor]
    interface: Interface
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    report: GraphReport
    stored: Stage[torch.Tensor] | str = "dlinfer.compile did not create it"

    def save(self, path: str | Path, *, key: bytes | None = None) -> None:
        """Write the artifact to a file that ``dlinfer.load`` opens on any machine: see docs/guides/artifacts.md.

        The file appears whole or not at all.

        key: 32 bytes to encrypt the file with, from ``dlinfer.runtime.artifact.sealing.new_key()``.

        Raises ArtifactStorageError if the graph holds something that a file cannot store. Raises ArtifactNotFoundError
        if the file cannot be written.
        """
        save({"forward": [self.stored]}, path, key)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the module's result for these arguments. Raises ArtifactInputError."""
        leaves = self._leaves(args, kwargs)
        values, _ = self.interface.bind(self.interface.values_among(leaves))
        results = self.run(*self.weights, *values)
        return pytree.tree_unflatten(list(results), self.out_spec)

    def _leaves(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[object]:
        names = list(self.in_spec.child(1).context)
        for name in sorted(set(names) ^ set(kwargs)):
            keyword = "a keyword argument"
            expected, passed = (keyword, "none") if name in names else ("none", keyword)
            raise ArtifactInputError(name=name, expected=expected, given=passed, advice=_SAME_CALL)
        leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in names}))
        if spec != self.in_spec:
            raise ArtifactInputError(name="arguments", expected=self.in_spec, given=spec, advice=_SAME_CALL)
        return leaves


@dataclass(frozen=True)
class Bundle:
    """The result of ``dlinfer.bundle``. entries: name of an entry -> its artifacts, one for each range of sizes."""

    entries: Mapping[str, tuple[Artifact, ...]]

    def __getitem__(self, entry: str) -> Artifact:
        """Return the artifact of an entry; of several artifacts, the first.

        Raises SessionCallError for an unknown entry.
        """
        if entry not in self.entries:
            raise SessionCallError(
                what="entry", name=entry, detail=f"the entries are {', '.join(self.entries)}"
            )
        return self.entries[entry][0]

    def save(self, path: str | Path, *, key: bytes | None = None) -> None:
        """Write the bundle to a file, as ``Artifact.save`` does. A tensor that several entries use is written once."""
        save({name: [stage.stored for stage in stages] for name, stages in self.entries.items()}, path, key)


def bundle(entries: Mapping[str, Artifact | Sequence[Artifact]]) -> Bundle:
    """Return several artifacts as one bundle: ``dlinfer.bundle({"prefill": a, "decode": b}).save(path)``.

    Each name is an entry. Its value is one artifact or several, called the stages of the entry. All stages of an entry
    have the same inputs and outputs, but accept different sizes. A run takes the first stage that accepts the sizes of
    its inputs.

    Artifacts of one module share its weights, in the file and in a session. They also share each buffer that they
    write, such as a KV cache.

    Raises ArtifactStorageError if a name is no identifier, or if two stages of an entry differ in more than sizes.
    """
    if not entries:
        raise ArtifactStorageError(what="a bundle", detail="it has no entries")
    return Bundle({name: _stages(name, artifacts) for name, artifacts in entries.items()})


def _stages(name: str, artifacts: Artifact | Sequence[object]) -> tuple[Artifact, ...]:
    stages = (artifacts,) if isinstance(artifacts, Artifact) else tuple(artifacts)
    checked = tuple(stage for stage in stages if isinstance(stage, Artifact))
    fault = ""
    if not name.isidentifier() or not name.isascii():
        fault = "its name is not an ASCII identifier"
    elif not stages or len(checked) < len(stages):
        fault = "it needs at least one artifact, and only artifacts of dlinfer.compile"
    elif len(set(map(_names_and_dtypes, checked))) > 1:
        fault = "the names or dtypes of inputs and outputs differ between its stages"
    if fault:
        raise ArtifactStorageError(what=f"entry {name!r}", detail=fault)
    return checked


def _names_and_dtypes(artifact: Artifact) -> object:
    """Return the names and dtypes of an artifact's inputs and outputs. All stages of an entry must have the same."""
    stage = artifact.stored
    if isinstance(stage, str):
        return stage
    ports = (*stage.interface.inputs, *stage.interface.outputs)
    return tuple((port.name, port.dtype) for port in ports), tuple(stage.interface.constants), *stage.results
