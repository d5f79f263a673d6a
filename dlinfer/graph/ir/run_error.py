"""Subclasses of GraphRunError that also belong to the exception class that eager mode would raise."""

import functools

from dlinfer.errors import GraphRunError

_PLAIN = frozenset(
    {
        *(Exception, ArithmeticError, FloatingPointError, OverflowError, ZeroDivisionError),
        *(AssertionError, BufferError, IndexError, KeyError, LookupError, MemoryError),
        *(NotImplementedError, RuntimeError, TypeError, ValueError),
    }
)


def run_error(kind: type[Exception]) -> type[GraphRunError] | None:
    """Return a subclass of GraphRunError that is also a ``kind``, so that ``except IndexError`` works as in eager mode.

    Return None if ``kind`` is not one of Python's plain exceptions, because its objects may have attributes of their
    own.
    """
    if issubclass(GraphRunError, kind):
        return GraphRunError
    base = next(parent for parent in kind.__mro__ if parent.__module__ == "builtins")
    is_plain = kind.__init__ is base.__init__ and kind.__new__ is base.__new__
    return _joined(kind) if is_plain and base in _PLAIN else None


@functools.cache
def _joined(kind: type[Exception]) -> type[GraphRunError]:
    def text(error: GraphRunError) -> str:  # KeyError would show the message's repr
        return str(error.args[0])

    def reduce(error: GraphRunError) -> tuple[object, ...]:
        return _rebuild, (kind, error.fields)

    body = {"__doc__": GraphRunError.__doc__, "__module__": GraphRunError.__module__}
    return type("GraphRunError", (GraphRunError, kind), {**body, "__str__": text, "__reduce__": reduce})


def _rebuild(kind: type[Exception], fields: dict[str, object]) -> GraphRunError:
    return _joined(kind)(**fields)
