"""Options of ``dlinfer.load`` and of a Session. Users pass them as keywords, as a dict or in a YAML file."""

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import cast

from dlinfer import settings
from dlinfer.errors import SessionOptionError, UnsupportedFeatureError

IO_MODES = ("caller", "owned")


class Flags(enum.IntFlag):
    """Flags of ``dlinfer.load``."""

    SHARE_MEM = 1
    """All sessions loaded with this flag use the same memory for inputs and outputs, and so run one at a time."""


@dataclass(frozen=True)
class SessionOptions:
    """Options of one session. The constructor checks them and raises SessionOptionError.

    engine: name of the graph engine. None means the engine that the artifact was compiled for.
    engine_options: the engine's own options, name -> value. They override the options stored in the artifact.
    fallback: what happens to nodes that the engine refuses: ``allow``, ``warn`` or ``error``. None means
        DLINFER_FALLBACK.
    cache_dir: folder for the engine's compiled files. None means DLINFER_CACHE_DIR.
    io: who owns the tensors of inputs and outputs. ``caller``: each call brings them. ``owned``: the session allocates
        them once, at the highest sizes, and methods such as ``get_input_tensor`` return them.
    enable_metrics: keep the latency of each run.
    enable_profiling: also profile the Python code of the first runs.
    allow_ops: names of other packages' ops that the artifact may call, such as ``torchvision::nms``.
    """

    engine: str | None = None
    engine_options: Mapping[str, object] = field(default_factory=dict[str, object])
    fallback: str | None = None
    cache_dir: Path | None = None
    io: str = "caller"
    enable_metrics: bool = True
    enable_profiling: bool = False
    allow_ops: tuple[str, ...] = ()

    AFTER_SETUP = ("io", "enable_metrics", "enable_profiling")
    """The options that may change after ``Session.setup``. Other options may change after ``Session.reset``."""

    def __post_init__(self) -> None:
        for name, (expected, is_valid) in _EXPECTED.items():
            value = getattr(self, name)
            if not is_valid(value):
                raise SessionOptionError(option=name, given=value, expected=expected)
        object.__setattr__(self, "allow_ops", tuple(self.allow_ops))
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", Path(self.cache_dir))

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options."""
        return [item.name for item in fields(cls)]

    @classmethod
    def of(cls, options: "Mapping[str, object] | str | Path | SessionOptions | None") -> "SessionOptions":
        """Return the options in a dict, or in a YAML file of names and values."""
        if isinstance(options, SessionOptions):
            return options
        return cls().changed(_from_yaml(options) if isinstance(options, (str, Path)) else options or {})

    def changed(self, changes: Mapping[str, object]) -> "SessionOptions":
        """Return a copy of the options with the values in ``changes``."""
        known = self.names()
        for name, value in changes.items():
            if name not in known:
                expected = "one of the options " + ", ".join(known)
                raise SessionOptionError(option=name, given=value, expected=expected)
        return replace(self, **changes)


def _is_names(value: object) -> bool:
    if not isinstance(value, Collection) or isinstance(value, str):
        return False
    return all(isinstance(name, str) for name in cast("Collection[object]", value))


def _one_of(*allowed: str | bool | None) -> tuple[str, Callable[[object], bool]]:
    def is_valid(value: object) -> bool:  # 1 == True, so the types must match too
        return any(type(value) is type(choice) and value == choice for choice in allowed)

    return "one of " + ", ".join(map(repr, allowed)), is_valid


_EXPECTED: dict[str, tuple[str, Callable[[object], bool]]] = {
    "fallback": _one_of(None, *settings.FALLBACK_POLICIES),
    "io": _one_of(*IO_MODES),
    "enable_metrics": _one_of(True, False),
    "enable_profiling": _one_of(True, False),
    "engine": ("the name of a graph engine", lambda value: value is None or isinstance(value, str)),
    "engine_options": ("a dict of name to value", lambda value: isinstance(value, Mapping)),
    "cache_dir": ("a path", lambda value: value is None or isinstance(value, (str, Path))),
    "allow_ops": ("a list of names", _is_names),
}
"""Option -> (a description of the allowed values, for errors; a function that checks a value)."""


def _from_yaml(path: str | Path) -> dict[str, object]:
    try:
        import yaml
    except ImportError:
        raise UnsupportedFeatureError(
            feature="a YAML file of options",
            where="this installation",
            advice=(
                "install the package `pyyaml` with pip install 'dlinfer[yaml]', or pass the options as a dict"
            ),
        ) from None
    try:
        options: dict[str, object] | None = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as cause:
        expected = f"a readable YAML file: {str(cause).splitlines()[0]}"
        raise SessionOptionError(option="options", given=str(path), expected=expected) from cause
    if options is not None and not (type(options) is dict and _is_names(options)):
        expected = "a YAML file that maps names to values"
        raise SessionOptionError(option="options", given=str(path), expected=expected)
    return options or {}
