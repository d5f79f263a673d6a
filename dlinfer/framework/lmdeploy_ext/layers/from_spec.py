"""The constructor that our implementations of LMDeploy's layers share."""

from typing import Any


class FromSpec:
    """An implementation that keeps the BuildSpec that LMDeploy makes it from."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec = spec
