"""What ``dlinfer.load`` and a Session can be told, as keywords, a dict or a YAML file."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dlinfer import settings
from dlinfer.errors import SessionOptionError, UnsupportedFeatureError

IO_MODES = ("caller", "owned")


class Flags(enum.IntFlag):
    """Flags of ``dlinfer.load``."""

    SHARE_MEM = 1
    """Sessions loaded with it share the memory that they run in, so one of them runs at a time."""


@dataclass(frozen=True)
class SessionOptions:
    """Options of one session, validated when they are made. Raises SessionOptionError.

    engine: name of the graph engine; None takes the one that the artifact was compiled for.
    engine_options: what only that engine knows, name -> value, over what the artifact was compiled with.
    fallback: what happens to nodes that the engine refuses, as in CompileOptions; None takes DLINFER_FALLBACK.
    cache_dir: folder of what the engine compiles; None takes DLINFER_CACHE_DIR.
    io: ``caller``: inputs and outputs are tensors of each call; ``owned``: the session has tensors of its own for
        them, at the highest sizes, which ``get_input_tensor`` and similar calls return.
    enable_metrics: keep the latency of each run. enable_profiling: also profile the Python of the first runs.
    allow_ops: names of ops, ``torchvision::nms``, of other packages that the artifact may call.
    """

    engine: str | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    fallback: str | None = None
    cache_dir: Path | None = None
    io: str = "caller"
    enable_metrics: bool = True
    enable_profiling: bool = False
    allow_ops: tuple[str, ...] = ()

    AFTER_SETUP = ("io", "enable_metrics", "enable_profiling")
    """Options that may be changed while a session is set up; the others take ``reset`` first."""

    def __post_init__(self) -> None:
        _one_of("fallback", self.fallback, (None, *settings.FALLBACK_POLICIES))
        _one_of("io", self.io, IO_MODES)
        for name in ("enable_metrics", "enable_profiling"):
            _one_of(name, getattr(self, name), (True, False))
        if self.engine is not None and not isinstance(self.engine, str):
            raise SessionOptionError(option="engine", given=self.engine, expected="the name of an engine")
        if not isinstance(self.engine_options, Mapping):
            expected = "a dict of name to value"
            raise SessionOptionError(option="engine_options", given=self.engine_options, expected=expected)
        if self.cache_dir is not None and not isinstance(self.cache_dir, (str, Path)):
            raise SessionOptionError(option="cache_dir", given=self.cache_dir, expected="a path")
        if isinstance(self.allow_ops, str) or not all(isinstance(name, str) for name in self.allow_ops):
            raise SessionOptionError(option="allow_ops", given=self.allow_ops, expected="a list of names")
        object.__setattr__(self, "allow_ops", tuple(self.allow_ops))
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", Path(self.cache_dir))

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options."""
        return [item.name for item in fields(cls)]

    @classmethod
    def of(cls, given: "Mapping[str, Any] | str | Path | SessionOptions | None") -> "SessionOptions":
        """Options from a dict, or from a YAML file of names and values."""
        if isinstance(given, SessionOptions):
            return given
        return cls().changed(from_yaml(given) if isinstance(given, (str, Path)) else dict(given or {}))

    def changed(self, changes: Mapping[str, Any]) -> "SessionOptions":
        """Return the same options with some changed."""
        known = self.names()
        for name in changes:
            if name not in known:
                expected = "one of the options " + ", ".join(known)
                raise SessionOptionError(option=name, given=changes[name], expected=expected)
        return replace(self, **changes)


def _one_of(option: str, given: Any, allowed: tuple[Any, ...]) -> None:
    if not any(given is one or (isinstance(given, str) and given == one) for one in allowed):
        expected = "one of " + ", ".join(map(repr, allowed))
        raise SessionOptionError(option=option, given=given, expected=expected)


def from_yaml(path: str | Path) -> dict[str, Any]:
    """Return the names and values of a YAML file. Raises SessionOptionError."""
    try:
        import yaml
    except ImportError:
        raise UnsupportedFeatureError(
            feature="a YAML file of options",
            where="this installation",
            advice="install the package `pyyaml` (pip install 'dlinfer[yaml]'), or pass the options as a dict",
        ) from None
    try:
        data = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as cause:
        reason = str(cause).splitlines()[0]
        raise SessionOptionError(
            option="options", given=str(path), expected=f"a YAML file: {reason}"
        ) from cause
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise SessionOptionError(
            option="options", given=str(path), expected="a YAML file of names and values"
        )
    return data
