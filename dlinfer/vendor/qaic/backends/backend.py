"""The interface of a Session's backend, which runs the model on a card (Qualcomm's package) or a CPU (ONNX Runtime)."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from dlinfer.vendor.qaic.tensors import TensorInfo

Arrays = Mapping[str, np.ndarray]
Benchmark = tuple[int, float, float, int]
"""Four numbers: the inferences that were completed, the inferences a second, the seconds, and the batch size."""


class Backend(Protocol):
    """A compiled model, created from its path and Options. Several threads may call ``run`` at the same time.

    inputs, outputs: known from creation on, even while the network is not loaded. defaults: inputs that may be left
    out, because the model has their values.
    """

    inputs: Mapping[str, TensorInfo]
    defaults: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]

    def settable(self) -> dict[str, Any]:
        """Return the options that may change after creation, and their present values."""
        ...

    def update(self, changed: Mapping[str, Any]) -> None:
        """Change options that ``settable`` lists."""
        ...

    def load(self) -> None:
        """Load the network unless it is loaded."""
        ...

    def release(self) -> None:
        """Release the loaded network's resources. The next ``run`` loads it again."""
        ...

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Run one inference on checked inputs."""
        ...

    def benchmark(self, count: int | None, seconds: float | None, inputs: Arrays | None) -> Benchmark:
        """Time ``count`` inferences, or as many as fit into ``seconds``, with checked inputs or else random ones."""
        ...
