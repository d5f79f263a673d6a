"""Weights that an engine built into a compiled region, and the check that they have not changed.

Many compilers repack a weight once, as a constant. But a PyTorch parameter can be trained, reloaded or replaced between
two calls. So each call compares its weights with the built-in ones. If they differ, the region is compiled again. The
comparison takes less than a microsecond per weight.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.graph.engine_kit.weight_samples import WeightSamples
from dlinfer.graph.ir.layout import span
from dlinfer.graph.ir.program import Function, Inputs


@dataclass(frozen=True)
class _Built:
    """One compilation with its weights.

    weights: the built-in tensors. While they are held here, no other tensor can get their addresses.
    marks: (index of the input, address, version) of each weight.
    samples: some elements of each weight.
    """

    run: Function
    weights: tuple[torch.Tensor, ...]
    marks: tuple[tuple[int, int, int], ...]
    samples: WeightSamples

    def fits(self, inputs: Inputs) -> bool:
        for index, address, version in self.marks:
            weight = inputs[index]
            if weight.data_ptr() != address or _version(weight) != version:
                return False
        return self.samples.same()  # no weight has moved

    def changed(self, marks: tuple[tuple[int, int, int], ...]) -> list[int]:
        """Return the indices of the inputs that are weights and have other memory or contents than the built-in ones.

        marks: the marks of the new call's weights.
        """
        moved = {
            number for number, (new, old) in enumerate(zip(marks, self.marks, strict=True)) if new != old
        }
        stayed = [number for number in range(len(marks)) if marks[number][1] == self.marks[number][1]]
        return [marks[number][0] for number in sorted(moved | self.samples.changed(stayed))]


class HeldWeights:
    """A region with built-in weights, called with all inputs. It compiles at the first call and when a weight changed.

    held: indices of the inputs that are built in.
    names: names of all inputs.
    build: a function that takes the tensors of the ``held`` inputs, in this order, and compiles the region with them.
        It returns the compiled function, which takes all inputs of the region.
    notes: a list that gets a sentence for each recompilation.

    A weight has changed if its address, its version or one of its sampled elements differs. Torch does not count writes
    through ``.data`` or to tensors made under ``inference_mode``. Such a write may go unnoticed if it touches less than
    an eighth of a weight; see ``dlinfer.refresh``. Several threads may call the object at the same time.
    """

    def __init__(
        self,
        held: Sequence[int],
        names: Sequence[str],
        build: Callable[[tuple[torch.Tensor, ...]], Function],
        notes: list[str],
    ) -> None:
        self.held = tuple(held)
        self.builds = 0
        self._names = names
        self._build = build
        self._notes = notes
        self._lock = threading.Lock()
        self._built: _Built | None = None

    def __call__(self, *inputs: object) -> Any:
        built = self._built
        if built is None or not built.fits(inputs):
            built = self._renewed(inputs)
        return built.run(*inputs)

    def release(self) -> None:
        """Free the weights and the compiled region; the next call recompiles."""
        with self._lock:
            self._built = None

    @property
    def nbytes(self) -> int:
        """The size of the built-in weights in bytes."""
        built = self._built  # read once: another thread may release it
        return sum(weight.nbytes for weight in built.weights) if built is not None else 0

    def _renewed(self, inputs: Inputs) -> _Built:
        with self._lock:
            old = self._built
            if old is not None and old.fits(inputs):  # another thread was first
                return old
            marks = tuple((index, inputs[index].data_ptr(), _version(inputs[index])) for index in self.held)
            # detach() makes another tensor: after ``parameter.data = other`` it still has the old memory.
            weights = tuple(inputs[index].detach() for index in self.held)
            for index, weight in zip(self.held, weights, strict=True):
                _check_memory(self._names[index], weight)
            samples = WeightSamples(weights)
            new = _Built(self._build(weights), weights, marks, samples)
            if old is not None:
                self._notes.append(self._change(old.changed(marks)))
            self._built = new
            self.builds += 1
            return new

    def _change(self, inputs: Sequence[int]) -> str:
        changed = [self._names[index] for index in inputs]
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return f"compiled again because weights changed: {', '.join(changed[:3])}{more}"


def _check_memory(name: str, weight: torch.Tensor) -> None:
    """Raise UnsupportedFeatureError for a weight whose storage is freed or shortened, as FSDP does between calls."""
    if weight.layout is not torch.strided or not weight.numel():
        return
    needed = (weight.storage_offset() + span(weight.shape, weight.stride())) * weight.element_size()
    available = weight.untyped_storage().nbytes()
    if available < needed:
        raise UnsupportedFeatureError(
            feature=f"weight {name!r} with a storage of {available} bytes instead of {needed}",
            where="a compiled graph",
            advice="restore the weight's storage before the call (with FSDP: gather the weight).",
        )


def _version(tensor: torch.Tensor) -> int:
    """Return torch's count of writes to the tensor's memory; 0 for inference tensors, which have no count."""
    return 0 if tensor.is_inference() else tensor._version


def refresh(model: torch.nn.Module | Iterable[torch.Tensor]) -> None:
    """Let every compiled graph rebuild its changed weights at its next call. Call this after writes through ``.data``.

    model: a module, compiled or not, or the written tensors. Engines that read weights in torch's memory need no
    refresh. Raises UnsupportedFeatureError for tensors that were made under ``torch.inference_mode``.
    """
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else list(model)
    if any(tensor.is_inference() for tensor in tensors):
        raise UnsupportedFeatureError(
            feature=(
                "a weight that was created under torch.inference_mode, where torch does not count writes,"
            ),
            where="dlinfer.refresh",
            advice="replace its memory (parameter.data = new), or create it outside torch.inference_mode.",
        )
    torch.autograd.graph.increment_version(tensors)
