"""The options of ``torch.compile(model, backend="dlinfer", options={...})`` and of ``dlinfer.compile``."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dlinfer import settings
from dlinfer.errors import CompileOptionError
from dlinfer.graph.torch_private.dispatcher import op_names

SMALL_REGIONS = ("eager", "engine")


@dataclass(frozen=True)
class CompileOptions:
    """Options of one compilation. The constructor checks them and raises CompileOptionError.

    engine: name of the graph engine. None takes DLINFER_ENGINE; if that is empty too, the default engine of the vendor
        for the model's device.
    fallback: what happens to nodes that the engine refuses. ``allow`` runs them with the vendor's eager kernels and
        counts them, ``warn`` also warns once for each reason, ``error`` refuses the model. None takes
        DLINFER_FALLBACK.
    passes: name of a pass or fusion rule -> False to turn it off; True is the default. A pass that only one engine has
        is named ``engine.pass``.
    eager_ops: names of ops that run with the vendor's eager kernels, outside the engine. Write names as
        ``dlinfer.explain`` shows them: ``dlinfer.rms_norm``, ``aten.add.Tensor``, or ``aten.add`` for all overloads.
        These ops do not count as fallbacks.
    small_regions: what happens to regions that cost more to enter than they save. ``eager`` runs them with eager
        kernels, ``engine`` compiles them nevertheless. None takes DLINFER_SMALL_REGIONS.
    cache_dir: folder of compiled artifacts; None takes DLINFER_CACHE_DIR.
    engine_options: options of the chosen engine (docs/reference/engines.md), name -> value. The options in
        DLINFER_ENGINE_OPTIONS are added, unless ``engine`` names another engine than DLINFER_ENGINE.
    """

    engine: str | None = None
    fallback: str | None = None
    passes: Mapping[str, bool] = field(default_factory=dict[str, bool])
    eager_ops: Sequence[str] = ()
    small_regions: str | None = None
    cache_dir: Path | None = None
    engine_options: Mapping[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        for option, allowed in (("fallback", settings.FALLBACK_POLICIES), ("small_regions", SMALL_REGIONS)):
            if (value := getattr(self, option)) not in (None, *allowed):
                expected = "one of " + ", ".join(map(repr, (None, *allowed)))
                raise CompileOptionError(option=option, given=value, expected=expected)
        _is_a("engine", self.engine, (str, type(None)), "the name of an engine")
        _is_a("passes", self.passes, Mapping, "a dict of name to bool")
        _is_a("engine_options", self.engine_options, Mapping, "a dict of name to value")
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", Path(self.cache_dir))
        from dlinfer.graph.passes.registry import pass_names

        known = pass_names()
        for name, keeps in self.passes.items():
            if name not in known and "." not in str(name):
                raise CompileOptionError(option="passes", given=name, expected="one of " + ", ".join(known))
            _is_a(f"passes[{name!r}]", keeps, bool, "True or False")
        _is_a("eager_ops", self.eager_ops, (list, tuple), "a list of op names")
        if self.eager_ops:
            object.__setattr__(self, "eager_ops", _known_ops(self.eager_ops))

    @property
    def policy(self) -> str:
        """The fallback policy: the option ``fallback`` if it is given, else the setting."""
        return self.fallback or settings.current().fallback

    @property
    def wanted_engine(self) -> str | None:
        """The engine's name: the option ``engine`` if it is given, else the setting.

        None means the vendor's default engine.
        """
        return self.engine or settings.current().engine or None

    @property
    def wanted_engine_options(self) -> dict[str, object]:
        """The engine's options by name. A value in ``engine_options`` replaces the one in DLINFER_ENGINE_OPTIONS."""
        chosen = settings.current()
        named_here = self.engine is not None and self.engine != chosen.engine
        text = "" if named_here else chosen.engine_options
        pairs = (item.partition("=") for item in text.split(",") if item)
        return {name.strip(): _value(value.strip()) for name, _, value in pairs} | dict(self.engine_options)

    @property
    def keeps_small_regions(self) -> bool:
        """Whether the engine also compiles small regions."""
        return (self.small_regions or settings.current().small_regions) == "engine"

    @property
    def disabled_passes(self) -> frozenset[str]:
        """The names of the passes and fusion rules that are turned off."""
        return frozenset(name for name, keeps in self.passes.items() if not keeps)

    def identity(self) -> dict[str, str | bool]:
        """Return the options for the field ``options`` of a cache key.

        The dict omits options that have a field of their own in the key, and ``cache_dir``, which changes no graph.
        """
        apart = ("engine", "engine_options", "passes", "cache_dir")
        others = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in apart}
        return others | {"fallback": self.policy, "small_regions": self.keeps_small_regions}

    @classmethod
    def of(cls, options: "Mapping[str, Any] | CompileOptions | None") -> "CompileOptions":
        """Return the options that torch.compile passes as a dict; for None, the defaults. Raises CompileOptionError."""
        if isinstance(options, CompileOptions):
            return options
        known = [item.name for item in fields(cls)]
        for name, value in (options or {}).items():
            if name not in known:
                expected = "one of the options " + ", ".join(known)
                raise CompileOptionError(option=name, given=value, expected=expected)
        return cls(**dict(options or {}))


def _known_ops(names: Sequence[object]) -> tuple[str, ...]:
    """Return the names sorted, without ``.default``. Raises CompileOptionError for a name that no op has."""
    known = op_names()
    plain = {str(name).removesuffix(".default") for name in names}
    for name in sorted(plain - known):
        close = difflib.get_close_matches(name, known)
        expected = f"the name of an op, such as {', '.join(close or ('aten.add', 'dlinfer.rms_norm'))}"
        raise CompileOptionError(option="eager_ops", given=name, expected=expected)
    return tuple(sorted(plain))


def _value(text: str) -> str | bool | int | float:
    """Return a value of DLINFER_ENGINE_OPTIONS as a bool or a number if it reads as one, else as text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_a(option: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kind):
        raise CompileOptionError(option=option, given=value, expected=expected)
