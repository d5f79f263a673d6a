"""Inference sessions of ONNX Runtime on the providers that the options name.

If ONNX Runtime leaves one of these providers out of a session, the session is refused.
"""

import functools
import hashlib
import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import CompileOptionError, ProviderFallbackError, ProviderUnavailableError
from dlinfer.graph.cache.key import canonical_text
from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.ops.core.fallback import Fallback, settle
from dlinfer.vendor.onnxruntime.options import CPU, OrtOptions

ENGINE = "onnxruntime"


_WRONG_REWRITES = ["NoopElimination"]
"""Optimisers of ONNX Runtime that change results and are disabled. NoopElimination drops x + 0, but -0.0 + 0 is 0.0."""


class SessionRefusedError(RefusedError):
    """ONNX Runtime does not accept a model. The message is ONNX Runtime's reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"ONNX Runtime: {reason}")


def version() -> str:
    import onnxruntime

    return onnxruntime.__version__


def check_providers(options: OrtOptions) -> None:
    """Raise ProviderUnavailableError if the installed package lacks one of the chosen providers."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    for name in options.providers:
        if name not in available:
            raise ProviderUnavailableError(
                provider=name,
                reason=f"the installed onnxruntime {onnxruntime.__version__} was built without it",
                available=", ".join(available),
            )


def make_session(
    model: bytes,
    options: OrtOptions,
    *,
    policy: str,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Return an ``onnxruntime.InferenceSession`` for a model.

    policy: the fallback policy for nodes that a chosen provider leaves to the CPU provider.
    weights: contents of the initialisers that the model names but does not contain. ONNX Runtime copies them.

    Raises SessionRefusedError if ONNX Runtime does not accept the model.
    Raises ProviderUnavailableError if a provider is not installed or is left out of the session.
    Raises ProviderFallbackError if the policy forbids a node on the CPU provider.
    Raises CompileOptionError if ``ep_context`` is set and no provider wrote a file there.
    """
    import onnxruntime

    check_providers(options)
    settings = _settings(options)
    held = []
    if weights:
        held = [onnxruntime.OrtValue.from_dlpack(value.detach()) for value in weights.values()]
        settings.add_external_initializers(list(weights), held)
    context = _context_file(model, options, weights or {})
    source: bytes | str = model
    if context is not None:
        if context.exists():
            source = str(context)
        else:
            settings.add_session_config_entry("ep.context_enable", "1")
            settings.add_session_config_entry("ep.context_file_path", str(context))
            settings.add_session_config_entry("ep.context_embed_mode", "1")
    session = _created(source, settings, options)
    _refuse_dropped(session, options)
    _settle_fallback(session, options, policy)
    if context is not None and not context.exists():
        raise CompileOptionError(
            option="engine_options['ep_context']",
            given=str(options.ep_context),
            expected=f"a provider that writes EP contexts; none of {', '.join(options.providers)} did",
        )
    return session


def why_refused(model: bytes) -> str | None:
    """Return the CPU provider's reason to refuse a model, such as a missing kernel; None if it accepts the model."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = 1
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        _created(model, settings, OrtOptions())
    except SessionRefusedError as refused:
        return str(refused)
    return None


@functools.cache
def ort_errors() -> tuple[type[Exception], ...]:
    """Return all exception classes of ONNX Runtime. They have no common base class below Exception."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    classes = (value for value in vars(state).values() if isinstance(value, type))
    return tuple(kind for kind in classes if issubclass(kind, Exception))


def _settings(options: OrtOptions) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    level = options.graph_optimization
    named = "ORT_DISABLE_ALL" if level == "disable" else f"ORT_ENABLE_{level.upper()}"
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, named)
    settings.intra_op_num_threads = options.intra_op_threads or torch.get_num_threads()
    settings.inter_op_num_threads = options.inter_op_threads
    mode = f"ORT_{options.execution_mode.upper()}"
    settings.execution_mode = getattr(onnxruntime.ExecutionMode, mode)
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return settings


def _created(source: bytes | str, settings: Any, options: OrtOptions) -> Any:
    import onnxruntime

    providers = [(name, dict(options.provider_options.get(name, {}))) for name in options.providers]
    try:
        # ONNX Runtime's own fallback prints a message and replaces a provider by the CPU's.
        return onnxruntime.InferenceSession(
            source, settings, providers=providers, enable_fallback=0, disabled_optimizers=_WRONG_REWRITES
        )
    except (*ort_errors(), RuntimeError, ValueError) as cause:
        raise SessionRefusedError(_first_line(cause)) from cause


def _first_line(cause: Exception) -> str:
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return lines[0].removeprefix("[ONNXRuntimeError] : ")


def _refuse_dropped(session: Any, options: OrtOptions) -> None:
    running = session.get_providers()
    for name in options.providers:
        if name not in running:
            raise ProviderUnavailableError(
                provider=name,
                reason="ONNX Runtime left it out of the session; only its log shows why",
                available=", ".join(running),
            )


def _settle_fallback(session: Any, options: OrtOptions, policy: str) -> None:
    """Apply the fallback policy to nodes that run on the CPU provider, if the options do not name this provider."""
    if CPU in options.providers:
        return
    nodes = [
        node
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == CPU
        for node in part.get_nodes()
    ]
    if not nodes:
        return
    kinds = Counter(node.op_type for node in nodes)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8))
    chosen = ", ".join(options.providers)

    def refusal() -> ProviderFallbackError:
        return ProviderFallbackError(provider=chosen, count=len(nodes), nodes=shown)

    def text() -> str:
        return (
            f"ONNX Runtime runs {len(nodes)} nodes ({shown}) on its CPU provider, because {chosen} does not run "
            "them."
        )

    settle(Fallback(chosen, ENGINE, f"left to the CPU provider: {shown}"), policy, refusal, text)


def _context_file(model: bytes, options: OrtOptions, weights: Mapping[str, torch.Tensor]) -> Path | None:
    """Return the file in ``ep_context`` that belongs to a model with these options and weights.

    Returns None if ``ep_context`` is None.
    """
    if options.ep_context is None:
        return None
    apart = ("ep_context", "intra_op_threads", "inter_op_threads")  # where it lies, and how it is run
    chosen = {item.name: getattr(options, item.name) for item in fields(options) if item.name not in apart}
    layouts = [(name, str(value.dtype), tuple(value.shape)) for name, value in weights.items()]
    digest = hashlib.sha256(canonical_text([version(), chosen, layouts, len(model)]).encode())
    digest.update(model)
    for value in weights.values():
        digest.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    options.ep_context.mkdir(parents=True, exist_ok=True)
    return options.ep_context / f"{digest.hexdigest()[:32]}.onnx"
