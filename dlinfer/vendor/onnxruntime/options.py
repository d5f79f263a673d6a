"""What ``options={"engine_options": {...}}`` can tell the engine."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dlinfer.errors import CompileOptionError

CPU = "CPUExecutionProvider"
OPTIMIZATION = ("disable", "basic", "extended", "all")
EXECUTION = ("sequential", "parallel")
WEIGHTS = ("shared", "constant")


@dataclass(frozen=True)
class OrtOptions:
    """Options of one compilation, validated when they are made. Raises CompileOptionError.

    providers: execution providers in order of preference, a list or text with commas or semicolons between.
    provider_options: provider -> its own options, as ONNX Runtime documents them.
    graph_optimization: how far ONNX Runtime rewrites the graph: ``disable``, ``basic``, ``extended`` or ``all``.
    intra_op_threads: threads inside an op; 0 takes as many as torch has.
    inter_op_threads: threads for ops side by side, where execution_mode is ``parallel``; 0 leaves it to ONNX Runtime.
    execution_mode: ``sequential`` or ``parallel``.
    weights: ``shared`` passes them to every run where torch has them; ``constant`` builds them into the session, which
        copies them, may fold and repack them, and is made anew when one changed; empty is ``shared`` where the CPU
        provider is the only one, else ``constant``, since other providers compile weights in.
    ep_context: folder of what providers compiled (ONNX Runtime's EP context models), written at the first
        compilation and loaded by later ones; needs a provider that writes it.
    """

    providers: tuple[str, ...] = (CPU,)
    provider_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    graph_optimization: str = "all"
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    execution_mode: str = "sequential"
    weights: str = ""
    ep_context: Path | None = None

    @property
    def holds_weights(self) -> bool:
        """Whether weights are built into the session."""
        return (self.weights or ("shared" if self.providers == (CPU,) else "constant")) == "constant"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "OrtOptions":
        """Options from names and values."""
        known = [item.name for item in fields(cls)]
        for name, value in given.items():
            if name not in known:
                expected = f"one of the options of engine 'onnxruntime': {', '.join(known)}"
                raise CompileOptionError(option=f"engine_options[{name!r}]", given=value, expected=expected)
        readers = {
            "providers": _providers,
            "provider_options": _provider_options,
            "graph_optimization": lambda name, value: _one_of(name, value, OPTIMIZATION),
            "execution_mode": lambda name, value: _one_of(name, value, EXECUTION),
            "weights": lambda name, value: _one_of(name, value, ("", *WEIGHTS)),
            "intra_op_threads": _count,
            "inter_op_threads": _count,
            "ep_context": _folder,
        }
        made = cls(**{name: readers[name](name, value) for name, value in given.items()})
        for name in made.provider_options:
            if name not in made.providers:
                _refuse("provider_options", name, f"one of the chosen providers: {', '.join(made.providers)}")
        return made


def _refuse(name: str, given: Any, expected: str) -> None:
    raise CompileOptionError(option=f"engine_options[{name!r}]", given=given, expected=expected)


def _one_of(name: str, given: Any, allowed: Sequence[str]) -> str:
    if given not in allowed:
        _refuse(name, given, "one of " + ", ".join(repr(item) for item in allowed if item))
    return given


def _count(name: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        _refuse(name, given, "a number of threads, 0 or more")
    return given


def _providers(name: str, given: Any) -> tuple[str, ...]:
    names = re.split(r"[,;]", given) if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(item, str) and item.strip() for item in names
    ):
        _refuse(name, given, "names of execution providers, as a list or with commas between")
    found = tuple(item.strip() for item in names)
    if not found or len(set(found)) < len(found):
        _refuse(name, given, "at least one execution provider, none twice")
    return found


def _provider_options(name: str, given: Any) -> dict[str, dict[str, str]]:
    if not isinstance(given, Mapping) or not all(isinstance(value, Mapping) for value in given.values()):
        _refuse(name, given, "a dict of provider to a dict of its options")
    return {
        str(provider): {str(key): str(value) for key, value in options.items()}
        for provider, options in given.items()
    }


def _folder(name: str, given: Any) -> Path | None:
    if given is None:
        return None
    if not isinstance(given, (str, Path)) or not str(given):
        _refuse(name, given, "a folder")
    return Path(given).expanduser()
