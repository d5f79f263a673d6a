"""The base class that our implementations of LMDeploy's layers share."""

from typing import Any


class FromSpec:
    """Base class of a layer that LMDeploy builds from a BuildSpec. The attribute ``spec`` is this BuildSpec."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec = spec
