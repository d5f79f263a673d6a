"""A cheap check at each call: does a written input share memory with another input?"""

from torch import Tensor

from dlinfer.graph.functional.aliasing import overlapping
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import fake
from dlinfer.graph.ir.program import Inputs


class InputOverlap:
    """Callable with a call's inputs. It returns why the function is wrong for them, or None.

    It remembers addresses and sizes of the last call, and compares the many weights again only when one of them or a
    written input has moved. Threads may call it at once.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._written = frozenset(index for index in function.writes if index is not None)
        self._steady = function.weights
        self._moving = [
            index
            for index, node in enumerate(function.inputs)
            if index not in self._steady and isinstance(fake(node), Tensor)
        ]
        self._written_places = {place for place, index in enumerate(self._moving) if index in self._written}
        self._apart: tuple[object, object] = (None, None)

    def __call__(self, inputs: Inputs) -> str | None:
        if not self._written:
            return None
        moving = [inputs[index] for index in self._moving]
        places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in moving]
        steady = [inputs[index].data_ptr() for index in self._steady]
        steady += [places[place] for place in self._written_places]
        known_places, known_steady = self._apart
        if steady != known_steady:
            reason = self._function.conflict(inputs)
        elif places != known_places:
            reason = overlapping(moving, self._written_places)
        else:
            return None
        self._apart = (None, None) if reason is not None else (places, steady)
        return reason
