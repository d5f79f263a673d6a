"""One option of a Session: its name, its allowed values, and the stage that uses it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlinfer.vendor.qaic.errors import QaicOptionError

Stage = Literal["run", "session", "compile"]
"""The stage that uses an option.

``run``: running; the option may change after the Session's creation.
``session``: creating the Session; the option is fixed then.
``compile``: compiling for a card; the option is the compiler's.
"""


@dataclass(frozen=True)
class Kind:
    """The allowed values of an option.

    words: a description for messages. read: a function that returns the value to store; None for a value not allowed.
    """

    words: str
    read: Callable[[Any], Any]


def _number(types: tuple[type, ...], low: float | None, high: float | None) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        # bool is an int in Python, but `num_activations: true` is a mistake.
        if isinstance(value, bool) or not isinstance(value, types):
            return None
        fits = (low is None or value >= low) and (high is None or value <= high)
        return value if fits else None

    return read


def _span(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return "" if low is None else f" of at least {low}"


def integer(low: int | None = None, high: int | None = None) -> Kind:
    """Allow an int from ``low`` to ``high``. None means no bound."""
    return Kind(f"an int{_span(low, high)}", _number((int,), low, high))


def number(low: float | None = None, high: float | None = None) -> Kind:
    """Allow a float or an int from ``low`` to ``high``. None means no bound."""
    return Kind(f"a number{_span(low, high)}", _number((int, float), low, high))


def choice(*allowed: str) -> Kind:
    """Allow each of the given words."""
    words = "one of " + ", ".join(repr(item) for item in allowed)
    return Kind(words, lambda value: value if isinstance(value, str) and value in allowed else None)


def list_of(kind: type) -> Kind:
    """Allow a list or tuple with items of the type ``kind``. It is stored as a tuple."""

    def read(value: Any) -> tuple[Any, ...] | None:
        right = isinstance(value, (list, tuple)) and all(type(item) is kind for item in value)
        return tuple(value) if right else None

    return Kind(f"a list of {kind.__name__}", read)


def _symbols(value: Any) -> dict[str, int] | None:
    if not isinstance(value, (Mapping, list, tuple)):
        return None
    pairs = list(value.items()) if isinstance(value, Mapping) else list(value)
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        return None
    right = all(isinstance(name, str) and type(size) is int and size > 0 for name, size in pairs)
    symbols = dict(pairs) if right else None
    return symbols if symbols is not None and len(symbols) == len(pairs) else None


TRUTH = Kind("True or False", lambda value: value if isinstance(value, bool) else None)
ONLY_TRUE = Kind(
    "True: dlinfer always compiles models and runs them itself", lambda value: value is True or None
)
TEXT = Kind("a str", lambda value: value if isinstance(value, str) and value else None)
PATH = Kind("a path", lambda value: str(value) if isinstance(value, (str, Path)) and str(value) else None)
SYMBOLS = Kind("a dict or a list of pairs, with each symbol's name and its size of at least 1", _symbols)


@dataclass(frozen=True)
class Option:
    """A row of the table of options.

    flag: the option's flag on the compiler's command line. Empty means the name with dashes, which is the rule of
        Qualcomm's own tools (``generate_bin`` of cloud-ai-sdk, QEfficient's ``compile``).
    spelled: for a bool option, the text after the flag for True, and the text for False. None leaves the flag out.
    """

    name: str
    kind: Kind
    stage: Stage
    doc: str
    flag: str = ""
    spelled: tuple[str | None, str | None] = ("", None)

    def parse(self, value: Any) -> Any:
        """Return the value to store for a user's value. Raises QaicOptionError if it is not allowed."""
        parsed = self.kind.read(value)
        if parsed is None:
            raise QaicOptionError(option=self.name, given=value, expected=self.kind.words)
        return parsed

    def arguments(self, value: Any) -> list[str]:
        """Return the arguments of the compiler's command line for a stored value."""
        flag = "-" + (self.flag or self.name.replace("_", "-"))
        if isinstance(value, bool):
            ending = self.spelled[0 if value else 1]
            return [] if ending is None else [flag + ending]
        if isinstance(value, dict):
            return [f"{flag}={symbol},{size}" for symbol, size in value.items()]
        if isinstance(value, tuple):
            return [f"{flag}={','.join(map(str, value))}"]
        return [f"{flag}={value}"]
