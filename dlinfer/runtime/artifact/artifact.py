"""An artifact: a compiled graph with its weights and its signature, callable like the module it was made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.interface.interface import Interface
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.report.report import GraphReport
from dlinfer.runtime.artifact.files import save
from dlinfer.runtime.artifact.stored import Stage


@dataclass
class Artifact:
    """The result of ``dlinfer.compile``. It shares the module's weights, and copies only those that torch holds lazily
    conjugated or negated.

    interface: what it takes, as the leaves of (args, kwargs).
    stored: what ``save`` writes, or why it cannot be saved.
    """

    run: CompiledGraph
    weights: Sequence[torch.Tensor]
    interface: Interface
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    report: GraphReport
    stored: Stage | str = "it was not made by dlinfer.compile"

    def save(self, path: str | Path, *, key: bytes | None = None) -> None:
        """Write it to a file that ``dlinfer.load`` opens, anywhere: see docs/guides/artifacts.md.

        The file appears whole or not at all. key: 32 bytes to encrypt it with, as
        ``dlinfer.runtime.artifact.sealing.new_key()`` makes them. Raises ArtifactStorageError where the graph holds
        something that has no place in a file, and ArtifactNotFoundError where the file cannot be written.
        """
        save({"forward": [self]}, path, key=key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result for these arguments. Raises ArtifactInputError."""
        leaves = self._leaves(args, kwargs)
        values, _ = self.interface.bind(self.interface.values_among(leaves))
        results = self.run(*self.weights, *values)
        return pytree.tree_unflatten(list(results), self.out_spec)

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        names = list(self.in_spec.child(1).context)
        if sorted(names) != sorted(kwargs):
            raise ArtifactInputError(name="keywords", expected=sorted(names), given=sorted(kwargs))
        leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in names}))
        if spec != self.in_spec:
            raise ArtifactInputError(name="arguments", expected=self.in_spec, given=spec)
        return leaves
