"""Tells an engine option that the user gave from one that has LMDeploy's default.

Some of LMDeploy's defaults do not fit a host, so dlinfer chooses other values for options that the user left out. An
option that the user gave stays, even if it equals LMDeploy's default. Marked defaults have a type of their own, which
survives copies, pickles and the way through LMDeploy's other configurations.
"""

from typing import Any

from dlinfer.framework.patching import Original, replaces


class UnchosenInt(int):
    """An int that is the default of an option."""


class UnchosenFloat(float):
    """A float that is the default of an option."""


def unchosen(default: float) -> float:
    """Return a default with the mark."""
    return UnchosenInt(default) if isinstance(default, int) else UnchosenFloat(default)


def is_given(value: float) -> bool:
    """Whether the user gave an option's value: it has no mark."""
    return not isinstance(value, UnchosenInt | UnchosenFloat)


def mark_defaults(config: Any, *options: str) -> None:
    """Mark those options of a dataclass instance that were left out when it was made."""
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
        why="gives the option's default to the engine as if the user had typed it",
        essential=False,
    )(_mark_default)
    for option in ("cache_max_entry_count", "max_prefill_token_num")
)
