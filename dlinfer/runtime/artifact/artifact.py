"""An artifact: a compiled graph with its weights and its signature, callable like the module it was made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.direct.inputs import Assumption
from dlinfer.graph.lowering.compiled import CompiledGraph
from dlinfer.graph.report.report import GraphReport

if TYPE_CHECKING:
    from dlinfer.runtime.artifact.stored import Stage


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a caller passes.

    sizes: numbers, or ranges (low, high or None) that the graph takes. strides: None for a contiguous tensor.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | tuple[int, int | None], ...]
    strides: tuple[int, ...] | None = None

    def misfit(self, value: Any) -> str | None:
        """What is wrong with a value for this input; None when nothing is."""
        if not isinstance(value, torch.Tensor):
            return f"a {type(value).__name__}"
        if value.dtype != self.dtype or value.device != self.device or value.dim() != len(self.sizes):
            return f"{value.dtype} {tuple(value.shape)} on {value.device}"
        for size, wanted in zip(value.shape, self.sizes, strict=True):
            low, high = (wanted, wanted) if isinstance(wanted, int) else wanted
            if size < low or (high is not None and size > high):
                return f"sizes {tuple(value.shape)}"
        if not (value.is_contiguous() if self.strides is None else value.stride() == self.strides):
            return f"sizes {tuple(value.shape)} with strides {value.stride()}"
        return None

    def __str__(self) -> str:
        sizes = ", ".join(
            str(size) if isinstance(size, int) else f"{size[0]}..{'' if size[1] is None else size[1]}"
            for size in self.sizes
        )
        layout = "contiguous" if self.strides is None else f"strides {self.strides}"
        return f"{self.dtype} [{sizes}] {layout} on {self.device}"


@dataclass(frozen=True)
class NumberSpec:
    """One integer that a caller passes and that may change. bounds: what it may be, as a size of TensorSpec."""

    name: str
    bounds: int | tuple[int, int | None]

    def misfit(self, value: Any) -> str | None:
        """What is wrong with a value for this input; None when nothing is."""
        low, high = (self.bounds, self.bounds) if isinstance(self.bounds, int) else self.bounds
        fits = type(value) is int and value >= low and (high is None or value <= high)
        return None if fits else repr(value)

    def __str__(self) -> str:
        return f"an integer of {self.bounds}"


@dataclass
class Artifact:
    """What ``dlinfer.compile`` gives. Weights are those of the module, shared and not copied.

    inputs: for each leaf of (args, kwargs), its spec, or the constant that the graph was made with.
    assumptions: what must be true of the inputs' sizes together.
    stored: the form in which it is saved, or why it has none.
    """

    run: CompiledGraph
    weights: Sequence[torch.Tensor]
    inputs: Sequence[TensorSpec | NumberSpec | Any]
    assumptions: Sequence[Assumption]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    report: GraphReport
    stored: "Stage | str" = "it was not made by dlinfer.compile"

    def save(self, path: str | Path, *, key: bytes | None = None) -> None:
        """Write it to a file that ``dlinfer.load`` opens, anywhere: see docs/artifacts.md.

        The file appears whole or not at all. key: 32 bytes to encrypt it with; ``dlinfer.runtime.artifact.sealing.new_key()``
        makes one. Raises ArtifactStorageError where the graph holds something that has no place in a file, and
        ArtifactNotFoundError where the file cannot be written.
        """
        from dlinfer.runtime.artifact.files import save

        save({"forward": [self]}, path, key=key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result for these arguments. Raises ArtifactInputError."""
        leaves = self._leaves(args, kwargs)
        for index, (wanted, value) in enumerate(zip(self.inputs, leaves, strict=True)):
            self._check(index, wanted, value)
        if self.assumptions:
            named = zip(self.inputs, leaves, strict=True)
            given = {spec.name: value for spec, value in named if isinstance(spec, (TensorSpec, NumberSpec))}
            for assumption in self.assumptions:
                assumption.check(given)
        # What the graph took as a constant (a number, None) is no input of it any more, but keeps its place.
        with torch.no_grad():
            results = self.run(*self.weights, *leaves)
        return pytree.tree_unflatten(list(results), self.out_spec)

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        names = list(self.in_spec.child(1).context)
        if sorted(names) != sorted(kwargs):
            raise ArtifactInputError(name="keywords", expected=sorted(names), given=sorted(kwargs))
        leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in names}))
        if spec != self.in_spec:
            raise ArtifactInputError(name="arguments", expected=self.in_spec, given=spec)
        return leaves

    def _check(self, index: int, wanted: Any, value: Any) -> None:
        if isinstance(wanted, (TensorSpec, NumberSpec)):
            wrong = wanted.misfit(value)
            if wrong is not None:
                raise ArtifactInputError(name=wanted.name, expected=wanted, given=wrong)
        elif type(value) is not type(wanted) or value != wanted:
            raise ArtifactInputError(name=f"argument {index}", expected=repr(wanted), given=repr(value))
