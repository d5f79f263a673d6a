"""The constructor that our implementations of LMDeploy's layers share."""

from typing import Any


class FromSpec:
    """Base of a layer that LMDeploy builds from a BuildSpec, kept as ``spec``."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec = spec
