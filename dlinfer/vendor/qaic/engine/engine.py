"""The graph engine ``qaic``, which exports a region to an .onnx file and runs it in a Session."""

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.graph.engine_kit.onnx_engine import OnnxEngine, OnnxLowered, OnnxModel
from dlinfer.graph.engine_kit.onnx_engine import Session as KitSession
from dlinfer.graph.engine_kit.options import EngineOptions, refuse
from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.functional.functionalize import Function
from dlinfer.graph.ir.dialect import fake
from dlinfer.vendor.qaic import sdk
from dlinfer.vendor.qaic.errors import QaicCompileError, QaicOptionError, QaicUnavailableError
from dlinfer.vendor.qaic.options.options import Options
from dlinfer.vendor.qaic.options.table import OPTIONS
from dlinfer.vendor.qaic.session import BACKENDS, Session

OWN = ("onnx_define_symbol", "output_dir", "enable_metrics", "enable_profiling")
"""Options of a Session that the engine does not take: each is about the symbols, files or runs of one model."""

CHANGING_SIZES = (
    "its sizes change between calls, but a QPC is compiled for fixed sizes (dynamic=False fixes them)"
)

TYPES = frozenset(
    getattr(torch, name) for name in "float16 float32 float64 int8 int16 int32 int64 uint8 bool".split()
)
"""The dtypes that arrays of a Session can have. numpy has no bfloat16."""


@dataclass(frozen=True)
class QaicEngineOptions(EngineOptions):
    """Options of the engine.

    backend: the Session's backend, ``aic`` or ``onnxruntime``.
    session: the Session's options by name. The options for symbols, the output folder, metrics and profiling (``OWN``)
        are not allowed.
    """

    backend: str = "aic"
    session: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.session.items():
            if name in OWN or name not in OPTIONS:
                known = ", ".join(["backend", *(option for option in OPTIONS if option not in OWN)])
                refuse(name, value, f"one of {known}")
        if self.backend not in BACKENDS:
            refuse("backend", self.backend, " or ".join(map(repr, BACKENDS)))
        try:
            Options(self.session)
        except QaicOptionError as error:
            refuse(str(error.fields["option"]), error.fields["given"], str(error.fields["expected"]))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "QaicEngineOptions":
        """Return the options in a user's dict. Raises CompileOptionError."""
        session = {name: value for name, value in options.items() if name != "backend"}
        return cls(options.get("backend", "aic"), session)


class QaicEngine(OnnxEngine[QaicEngineOptions]):
    """Runs regions of a graph in Qualcomm's Session."""

    name = "qaic"
    options_type = QaicEngineOptions
    stored_options: Collection[str] = ("convert_to_fp16",)
    concurrent = True  # a Session may run in many threads at once
    refuses_writes = (
        "it writes into a tensor, but a Session returns new arrays: a KV cache would be copied at every call"
    )

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        """Return a reason to refuse a dtype if numpy lacks it; else None."""
        return None if dtype in TYPES else f"it uses {dtype}, which a Session's numpy arrays cannot have"

    def lower(self, function: Function, options: QaicEngineOptions, policy: str) -> OnnxLowered:
        """Convert the function to ONNX. policy: the fallback policy, which has no effect here.

        Raises QaicUnavailableError if the backend is ``aic`` and the SDK is missing.
        """
        if options.backend == "aic":
            _require_sdk()
            if not all(map(_is_fixed, map(fake, function.inputs))):
                raise RefusedError(CHANGING_SIZES)
        lowered = OnnxLowered(self, function, options)
        lowered.placement = f"qaic session, backend {options.backend}"
        lowered.source = f"Session(backend={options.backend!r}) of {len(lowered.graph)} ONNX nodes"
        return lowered

    def session(self, model: OnnxModel, options: QaicEngineOptions) -> KitSession:
        """Return a function that runs the model in a new Session.

        The Session reads the model from a temporary file, which is deleted: the backend keeps a copy of the weights.
        """
        with tempfile.TemporaryDirectory(prefix="dlinfer-qaic-") as folder:
            try:
                session = Session(model.save(Path(folder)), backend=options.backend, **options.session)
            except QaicCompileError as error:
                raise RefusedError(error.explanation) from error
        known, names = session.model_input_shape_dict(), model.graph.outputs

        def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
            outputs = session.run({name: value.numpy() for name, value in inputs.items() if name in known})
            return [torch.from_numpy(outputs[name]) for name in names]

        return run


def _is_fixed(value: Any) -> bool:
    """Return whether a value is a tensor whose sizes are numbers, so that they are the same in every call."""
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def _require_sdk() -> None:
    lacking = sdk.missing(compiling=True)
    if lacking:
        raise QaicUnavailableError(
            what="compile a graph for a card",
            missing="; ".join(lacking),
            advice="install Qualcomm's Cloud AI Platform and Apps SDKs with the package qaic, or run the graph here: "
            "options={'engine': 'qaic', 'engine_options': {'backend': 'onnxruntime'}}",
        )
