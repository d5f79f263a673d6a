"""The engine's options, set by ``options={"engine_options": {...}}``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlinfer.graph.engine_kit.options import (
    EngineOptions,
    ExpectedError,
    one_of,
    option,
    refuse,
    whole,
)

CPU = "CPUExecutionProvider"
_LEVEL = whole(0, "a level of MatMulNBits, 0 to 4", lambda level: level <= 4)
_THREADS = whole(0, "a number of threads, 0 or more")


def _providers(value: Any) -> tuple[str, ...]:
    names = re.split(r"[,;]", value) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(item, str) and item.strip() for item in names
    ):
        raise ExpectedError("names of execution providers, as a list or comma-separated")
    providers = tuple(item.strip() for item in names)
    if not providers or len(set(providers)) < len(providers):
        raise ExpectedError("at least one execution provider, and none of them twice")
    return providers


def _provider_options(value: Any) -> dict[str, dict[str, str]]:
    if not isinstance(value, Mapping) or not all(isinstance(options, Mapping) for options in value.values()):
        raise ExpectedError("a dict that maps each provider to a dict of its options")
    return {
        str(provider): {str(name): str(setting) for name, setting in options.items()}
        for provider, options in value.items()
    }


def _folder(value: Any) -> Path | None:
    if value is not None and (not isinstance(value, (str, Path)) or not str(value)):
        raise ExpectedError("a folder")
    return None if value is None else Path(value).expanduser()


@dataclass(frozen=True)
class OrtOptions(EngineOptions):
    """Options of the engine for one compilation.

    providers: execution providers in order of preference, as a list or as text with commas or semicolons.
    provider_options: maps a provider to the provider's own options, which ONNX Runtime documents.
    graph_optimization: how far ONNX Runtime rewrites the graph: ``disable``, ``basic``, ``extended`` or ``all``.
    intra_op_threads: the number of threads of one op; 0 means torch's number.
    inter_op_threads: the number of ops that run at once if execution_mode is ``parallel``; 0 lets ONNX Runtime decide.
    execution_mode: ``sequential`` or ``parallel``.
    weights: ``shared`` passes torch's own memory to every run. ``constant`` builds weights into the session, which
        copies them and may fold and repack them; if a weight changes, a new session is made. Empty means ``shared`` if
        the CPU provider is the only one, else ``constant``, since other providers compile weights in.
    accuracy_level: how products with 4-bit weights may round their input, as a number of the op MatMulNBits. 0 and 1
        keep float32; 4 rounds to 8 bits; 2 (float16) and 3 (bfloat16) are for other providers than the CPU's.
    ep_context: the folder of compiled models (ONNX Runtime's EP context models). The first compilation of a model
        writes a file there, and later ones load it. This needs a provider that writes such models.
    """

    providers: tuple[str, ...] = option((CPU,), _providers)
    provider_options: Mapping[str, Mapping[str, str]] = option(
        None, lambda value: _provider_options(value or {})
    )
    graph_optimization: str = option("all", one_of("disable", "basic", "extended", "all"))
    intra_op_threads: int = option(0, _THREADS)
    inter_op_threads: int = option(0, _THREADS)
    execution_mode: str = option("sequential", one_of("sequential", "parallel"))
    weights: str = option("", one_of("", "shared", "constant"))
    accuracy_level: int = option(0, _LEVEL)
    ep_context: Path | None = option(None, _folder)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.provider_options:
            if name not in self.providers:
                refuse("provider_options", name, f"one of the chosen providers: {', '.join(self.providers)}")

    @property
    def holds_weights(self) -> bool:
        return (self.weights or ("shared" if self.providers == (CPU,) else "constant")) == "constant"
