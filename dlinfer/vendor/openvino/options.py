"""The engine's own options: ``options={"engine_options": {...}}`` or DLINFER_ENGINE_OPTIONS; docs/engines.md."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dlinfer.errors import CompileOptionError

PRECISIONS = ("model", "f32", "bf16", "f16")
WEIGHTS = ("model", "int8", "int4")


@dataclass(frozen=True)
class OpenVINOOptions:
    """Validated when made. Raises CompileOptionError.

    device: an OpenVINO device: ``CPU``, ``GPU``, ``GPU.1``, ``NPU``.
    precision: in which type the device computes: the model's own, or another.
    weights: of linear layers: as they are, or compressed to 8 bits a weight with a scale for each row, or to 4 bits
        with a scale for each group.
    group_size: weights of a row that share a scale with ``int4``.
    dynamic_quantization_group_size: elements of an activation that are quantised together to 8 bits where weights are
        compressed; 0 keeps activations as they are.
    num_threads: of the CPU; 0 takes torch's.
    """

    device: str = "CPU"
    precision: str = "model"
    weights: str = "model"
    group_size: int = 128
    dynamic_quantization_group_size: int = 0
    num_threads: int = 0

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("weights", self.weights, WEIGHTS)
        if not isinstance(self.device, str) or not self.device:
            _refuse("device", self.device, "the name of an OpenVINO device, such as 'CPU' or 'GPU.0'")
        if not _is_whole_number(self.group_size, 1) or self.group_size % 2:
            _refuse("group_size", self.group_size, "an even number above 0")
        for name in ("dynamic_quantization_group_size", "num_threads"):
            if not _is_whole_number(getattr(self, name), 0):
                _refuse(name, getattr(self, name), "a whole number, 0 or above")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "OpenVINOOptions":
        """Options by name. Raises CompileOptionError naming the valid ones."""
        known = [item.name for item in fields(cls)]
        for name, value in given.items():
            if name not in known:
                _refuse(name, value, "one of the engine's options " + ", ".join(known))
        return cls(**dict(given))


def _is_whole_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _one_of(name: str, given: Any, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        _refuse(name, given, "one of " + ", ".join(map(repr, allowed)))


def _refuse(name: str, given: Any, expected: str) -> None:
    raise CompileOptionError(option=f"engine_options[{name!r}]", given=given, expected=expected)
