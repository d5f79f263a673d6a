"""torch.onnx's exporter: its table of translations, and its translation of a graph node by node.

The public ``torch.onnx.export`` retraces a whole exported program, and reads its table anew at each call. For a region
of five nodes it takes seconds, while the functions here take milliseconds. The public function would also drop or
refuse the writes of a region. ``dlinfer.graph.functional`` has removed these writes before, so a region needs only the
table and the translation. ``tests/graph/test_what_torch_offers.py`` shows all of this.
"""

# Parts of torch have no types, and some names are private.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

import dis
import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

_lock = threading.Lock()


class UntranslatableError(Exception):
    """The exporter could not translate the node named ``node``, because of ``reason``."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


class Registry:
    """The exporter's table: torch op -> functions that write the op as ONNX. dlinfer's functions come first."""

    def __init__(self, opset: int, ours: Mapping[OpOverload, Callable[..., object]]) -> None:
        from torch.onnx._internal.exporter import _registration

        self.opset = opset
        table = _torch_table(opset)
        self._table = _registration.ONNXRegistry()
        self._table._opset_version = opset
        self._table.functions = {name: list(functions) for name, functions in table.functions.items()}
        for op, function in ours.items():
            meta = _registration.OnnxDecompMeta(
                onnx_function=function,
                fx_target=op,
                signature=None,
                is_custom=True,
                skip_signature_inference=True,
            )
            self._table._register(op, meta)
        self.ours = frozenset(ours)
        self._unread: dict[OpOverload, frozenset[str]] = {}

    def _functions(self, target: Any) -> list[Callable[..., object]]:
        return [entry.onnx_function for entry in self._table.get_decomps(target) if not entry.is_complex]

    def knows(self, target: object) -> bool:
        return bool(self._functions(target))

    def unread(self, op: OpOverload) -> frozenset[str]:
        """Return the names of the op's parameters that its translation never reads."""
        if op not in self._unread:
            unread = map(_never_loaded, map(_python_function, self._functions(op)[:1]))
            self._unread[op] = frozenset[str]().union(*unread)
        return self._unread[op]

    @functools.cached_property
    def decompositions(self) -> dict[Any, Callable[..., object]]:
        """torch's decompositions of the ops that have no translation."""
        from torch.onnx._internal.exporter import _decomp

        known = set(_decomp.get_onnx_implemented_overloads(self._table))
        return dict(_decomp.create_onnx_friendly_decomposition_table(known))

    def translate(self, graph: fx.Graph, name: str) -> Any:
        """Return the graph as an ``onnx_ir.Model``. The graph's nodes must carry fakes. Raises UntranslatableError."""
        import onnx_ir
        from torch.onnx._internal.exporter import _constants, _core, _errors, _ir_passes

        model = onnx_ir.Model(
            onnx_ir.Graph([], [], nodes=[], name=name), ir_version=_constants.ONNX_IR_VERSION
        )
        try:
            with _lock:  # the exporter keeps the tracer of the op being translated in a global
                _core._translate_fx_graph(
                    graph,
                    model,
                    graph_like=model.graph,
                    owned_graphs={},
                    lower="at_conversion",
                    registry=self._table,
                )
        except _errors.ConversionError as error:
            node = re.search(r"translating node %(\w+)", str(error))
            raise UntranslatableError(node[1] if node else "", _cause(error)) from error
        model.opset_imports[""] = self.opset
        _ir_passes.add_opset_imports(model)
        model.opset_imports[""] = self.opset
        return model


def _python_function(function: object) -> Callable[..., object]:
    """Return a translation's plain Python function. onnxscript wraps such functions in objects of its own."""
    while not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        function = next(
            getattr(function, name) for name in ("__wrapped__", "func", "function") if hasattr(function, name)
        )
    return function


def _never_loaded(function: Callable[..., object]) -> set[str]:
    loaded: set[str] = set()
    for instruction in dis.get_instructions(function):
        if any(kind in instruction.opname for kind in ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")):
            value = instruction.argval
            loaded.update(value if isinstance(value, tuple) else [value])  # one instruction may load two
    return set(inspect.signature(function).parameters) - loaded


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"torch.onnx: {type(error).__name__}: {lines[0] if lines else ''}"


@functools.lru_cache(maxsize=4)
def _torch_table(opset: int) -> Any:
    from torch.onnx._internal.exporter import _registration

    # The registry logs a warning for each op of a package that is not installed (torchvision).
    logger = logging.getLogger(_registration.__name__)
    with _lock:  # one puts the level back before another looks at it
        before = logger.level
        logger.setLevel(logging.ERROR)  # not by assignment: a logger remembers what it has let pass
        try:
            return _registration.ONNXRegistry.from_torchlib(opset)
        finally:
            logger.setLevel(before)


def onnx_type(dtype: torch.dtype) -> int | None:
    """Return ONNX's number for a dtype; None if ONNX has no such type."""
    from torch.onnx._internal.exporter import _core

    number = _core._TORCH_DTYPE_TO_ONNX.get(dtype)
    return None if number is None else int(number)
