"""The other correct runs of a program, against which its results are judged (see ``compare``)."""

from collections.abc import Sequence

from tests.fuzz import execute
from tests.fuzz.execute import CallTrace
from tests.fuzz.perturb import perturbing
from tests.fuzz.program import Program

_PERTURBED = 16


class Budget:
    """Other correct runs, made once and only for a program whose results are not plainly equal."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._runs: Sequence[Sequence[CallTrace]] | None = None

    def __call__(self) -> Sequence[Sequence[CallTrace]]:
        if self._runs is None:
            self._runs = [self._run(True), *(self._run(False, seed) for seed in range(_PERTURBED))]
        return self._runs

    def _run(self, widen: bool, seed: int = 0) -> list[CallTrace]:
        model, kept = execute.module(self._program, widen)
        make = execute.run_step if widen else perturbing(seed)
        return execute.calls(
            self._program, execute.interpreted(self._program, model, widen, make), kept, widen
        )
