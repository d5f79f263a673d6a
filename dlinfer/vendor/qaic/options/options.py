"""The checked options of one Session, given as keywords and in a YAML file.

An unknown name raises an error with a hint.
"""

import difflib
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from dlinfer import settings
from dlinfer.vendor.qaic.errors import QaicOptionError
from dlinfer.vendor.qaic.options.option import Stage
from dlinfer.vendor.qaic.options.table import ALIASES, OPTIONS

# The defaults of a card's runtime, from the "Runtime parameters" of Qualcomm's model settings.
DEFAULTS = {"num_activations": 1, "set_size": 10, "dev_id": 0}


class QaicOptionWarning(UserWarning):
    """An option has no effect on the backend, or has a name that only some of Qualcomm's texts use."""


class Options(Mapping[str, Any]):
    """The options of one Session, as a mapping from an option's name to its stored value.

    Variants of a name are replaced by the name in the table. Only options of the stage ``run`` may change.
    """

    def __init__(self, options: Mapping[str, Any], source: str = "Session") -> None:
        self._values = _checked(options, source)
        if self._values.get("enable_metrics") and self._values.get("enable_profiling"):
            raise QaicOptionError(
                option="enable_metrics",
                given=True,
                expected="only one of enable_metrics and enable_profiling",
            )

    @classmethod
    def of(cls, in_file: Mapping[str, Any], keywords: Mapping[str, Any]) -> "Options":
        """Return the checked options of a file and of keywords. A keyword overrides the file.

        Raises QaicOptionError.
        """
        return cls({**_checked(in_file, "options_path"), **_checked(keywords, "Session")})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def of_stage(self, stage: Stage) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if OPTIONS[name].stage == stage}

    def changes(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check new values of ``run`` options, and return them under the table's names. This object does not change.

        Raises QaicOptionError.
        """
        changed = _checked(options, "update_backend_options")
        for name, value in changed.items():
            if OPTIONS[name].stage != "run":
                settable = ", ".join(row for row in OPTIONS if OPTIONS[row].stage == "run")
                expected = f"one of the options that may change after creation: {settable}"
                raise QaicOptionError(option=name, given=value, expected=expected)
        return changed

    def update(self, changed: Mapping[str, Any]) -> None:
        self._values |= changed


def _checked(options: Mapping[str, Any], source: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in options.items():
        name = _right_name(key, value, source)
        parsed = OPTIONS[name].parse(value)
        if values.setdefault(name, parsed) != parsed:
            raise QaicOptionError(
                option=key, given=value, expected=f"only one value for {name!r}, which is given twice"
            )
    return values


def _right_name(key: Any, value: Any, source: str) -> str:
    # Published YAML files write some keys like the compiler's flags: multicast-weights.
    name = key.replace("-", "_") if isinstance(key, str) else key
    if name in OPTIONS:
        return name
    if name in ALIASES:
        hint = f"option {name!r} means {ALIASES[name]!r}; use that name"
        warnings.warn(hint, QaicOptionWarning, stacklevel=_outside())
        return ALIASES[name]
    close = difflib.get_close_matches(str(name), OPTIONS, n=1)
    meant = f"{close[0]!r} (did you mean that?), or " if close else ""
    raise QaicOptionError(
        option=key, given=value, expected=f"{meant}one of {', '.join(OPTIONS)}, in {source}"
    )


def without_effect(values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Apply the fallback policy to options that have no effect on a backend.

    reasons: the name of such an option -> the reason why it has no effect. values: option's name -> value.
    ``allow`` does nothing, ``warn`` gives one warning, and ``error`` raises QaicOptionError.
    """
    policy = settings.current().fallback
    if policy == "allow" or not reasons:
        return
    if policy == "error":
        name, why = next(iter(reasons.items()))
        expected = (
            f"no value: the option has no effect on this backend ({why}), and the fallback policy is 'error'"
        )
        raise QaicOptionError(option=name, given=values[name], expected=expected)
    listed = "; ".join(f"{name} ({why})" for name, why in reasons.items())
    warnings.warn(
        f"options without effect on this backend: {listed}", QaicOptionWarning, stacklevel=_outside()
    )


def _outside() -> int:
    """Return the stack level of the first caller outside dlinfer, so that a warning shows the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("dlinfer."):
        level, frame = level + 1, frame.f_back
    return level
