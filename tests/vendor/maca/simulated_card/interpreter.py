"""Triton's interpreter as the card: of Triton 3.9.0, mended where it is no card.

It multiplies bfloat16 numbers by their bits, and changes Triton's modules while a kernel runs, which two threads undo
for each other.
"""

import importlib
import importlib.util
import threading
from typing import Any

from tests.vendor import simulated_graph


def mend() -> None:
    """Let ``tl.dot`` see bfloat16 as float32, which holds every product of two, and one kernel run at a time.

    Nothing to do without Triton.
    """
    if importlib.util.find_spec("triton") is None:
        return
    language = importlib.import_module("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = [
            self.cast_impl(one, language.float32) if one.dtype.scalar == language.bfloat16 else one
            for one in (a, b)
        ]
        return plain(self, *wide, *others)

    builder.create_dot = create_dot
    executor = interpreter.GridExecutor
    launch, running = executor.__call__, threading.Lock()

    def alone(self: Any, *args: Any, **kwargs: Any) -> None:
        def run(*given: Any, **named: Any) -> None:
            with running:
                launch(self, *given, **named)

        if simulated_graph.capturing():
            simulated_graph.record("Triton", run, args, kwargs)
        else:
            run(*args, **kwargs)

    executor.__call__ = alone
