"""What engines have in common whose regions run in a runtime of their own."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from dlinfer.graph.ir.callee import resolve


class TorchSteps:
    """Part of an ``Engine`` whose only programs are those of regions that it gave back to torch (``eager_region``).

    What it compiles is a callable of its own and no program, so a stored program has only steps of torch in it, and
    those are there in every process.
    """

    def resolve(self, callee: str) -> Callable[..., Any]:
        """The function of torch or dlinfer behind a step."""
        return resolve(callee)

    def restore(self, callees: Collection[str], cache_dir: Path) -> None:
        """Look that there is a function behind each; nothing is read from the cache."""
        for callee in callees:
            resolve(callee)

    def keeps(self, callees: Collection[str]) -> bool:
        """Steps of torch are always there."""
        return True
