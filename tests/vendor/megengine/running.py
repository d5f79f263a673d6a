"""Running ``models.layer`` and ``models.held``, and what is right."""

from pathlib import Path
from typing import Any

import numpy as np

from dlinfer.vendor.megengine.lite import LiteConfig, LiteNetwork, LiteNetworkIO
from tests.vendor.megengine.models import WEIGHT, expected_layer

TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}  # float32: sums of 8 products of about 1


def loaded(
    path: Path, before: Any = None, config: LiteConfig | None = None, io: LiteNetworkIO | None = None
) -> LiteNetwork:
    """A network of a file; ``before`` is called with it before it is loaded."""
    network = LiteNetwork(config, io)
    if before is not None:
        before(network)
    network.load(path)
    return network


def with_options(**options: int) -> LiteConfig:
    config = LiteConfig()
    for name, value in options.items():
        setattr(config.options, name, value)
    return config


def feed(network: LiteNetwork, data: np.ndarray) -> None:
    network.get_io_tensor("data").set_data_by_copy(data)
    network.get_io_tensor("weight").set_data_by_copy(WEIGHT)


def run(network: LiteNetwork, data: np.ndarray) -> np.ndarray:
    feed(network, data)
    network.forward()
    network.wait()
    return network.get_io_tensor("result_0").to_numpy()


def check(network: LiteNetwork, rng: np.random.Generator, batch: int = 4) -> None:
    """The network computes ``models.layer``."""
    data = rng.standard_normal((batch, 8)).astype("float32")
    np.testing.assert_allclose(run(network, data), expected_layer(data), **TOLERANCE)
