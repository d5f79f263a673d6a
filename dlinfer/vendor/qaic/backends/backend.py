"""The interface of a Session's backend, which runs the model on a card (Qualcomm's package) or a CPU (ONNX Runtime)."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from dlinfer.vendor.qaic.tensors import TensorInfo

Arrays = Mapping[str, np.ndarray]
Benchmark = tuple[int, float, float, int]
"""(inferences completed, inferences a second, seconds, batch size)"""


class Backend(Protocol):
    """A compiled model. Made with its path and Options; threads may call ``run`` at once.

    inputs, outputs: known from creation on, whether the network is loaded or not.
    defaults: inputs that may be left out, because the model has their values.
    """

    inputs: Mapping[str, TensorInfo]
    defaults: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]

    def settable(self) -> dict[str, Any]:
        """Return the options that may change after creation, with their values in force."""
        ...

    def update(self, changed: Mapping[str, Any]) -> None:
        """Apply changes of ``settable`` options."""
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
        """Run for a count or for a time, on checked inputs or random ones, and time the inferences alone."""
        ...
