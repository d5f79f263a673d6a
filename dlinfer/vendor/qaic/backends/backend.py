"""The interface of a Session's backend, which runs the model on a card or on ONNX Runtime."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from dlinfer.vendor.qaic.tensors import TensorInfo

Arrays = Mapping[str, np.ndarray]
Benchmark = tuple[int, float, float, int]
"""Completed inferences, inferences a second, seconds, and batch size."""


class Backend(Protocol):
    """A compiled model, created from a model file and Options. Several threads may call ``run`` at the same time.

    inputs, outputs: the shapes and types by name. They are known even while the network is not loaded.
    defaults: the inputs that a caller may leave out, because the model has values for them.
    """

    inputs: Mapping[str, TensorInfo]
    defaults: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]

    def settable(self) -> dict[str, Any]:
        """Return the options that may change after creation, with their present values."""
        ...

    def update(self, changed: Mapping[str, Any]) -> None:
        """Set new values of options that ``settable`` returns."""
        ...

    def load(self) -> None:
        """Load the network to the device if it is not loaded."""
        ...

    def release(self) -> None:
        """Release the device's resources that the network uses. The next ``run`` loads the network again."""
        ...

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Run one inference. inputs: arrays that ``check_inputs`` has accepted."""
        ...

    def benchmark(self, count: int | None, seconds: float | None, inputs: Arrays | None) -> Benchmark:
        """Run ``count`` inferences, or as many as start within ``seconds``, and return their times.

        inputs: arrays that ``check_inputs`` has accepted; None means random arrays.
        """
        ...
