"""Marks the default values of engine options, to distinguish them from values that the user gave.

Some of LMDeploy's defaults are bad choices on a host, so dlinfer replaces the values of options that the user left out.
It keeps a value that the user gave, even if it equals LMDeploy's default. A default is marked by its type, a subclass
of int or float, so the mark survives copies, pickles and LMDeploy's other configurations.
"""

from typing import Any

from dlinfer.framework.patching import Original, replaces


class UnchosenInt(int):
    """An int that is an option's default value."""


class UnchosenFloat(float):
    """A float that is an option's default value."""


def unchosen(default: float) -> float:
    """Return a default value with the mark, as an UnchosenInt or UnchosenFloat."""
    return UnchosenInt(default) if isinstance(default, int) else UnchosenFloat(default)


def is_given(value: float) -> bool:
    """Return whether the user gave this value of an option: whether it lacks the mark of default values."""
    return not isinstance(value, UnchosenInt | UnchosenFloat)


def mark_defaults(config: Any, *options: str) -> None:
    """Mark the values of those ``options`` that the user left out when creating ``config``, a dataclass instance."""
    for option in options:
        value = getattr(config, option)
        if value is getattr(
            type(config), option
        ):  # the very object: an equal number that the user gave is another
            setattr(config, option, unchosen(value))


def _mark_default(original: Original, parser: Any) -> Any:
    action = original(parser)
    action.default = unchosen(action.default)
    return action


PATCHES = tuple(
    replaces(
        f"lmdeploy.cli.utils:ArgumentHelper.{option}",
        why="passes the option's default to the engine as if the user had typed it",
        essential=False,
    )(_mark_default)
    for option in ("cache_max_entry_count", "max_prefill_token_num")
)
