"""torch.onnx's exporter: its table of translations, and its translation of a graph node by node.

The public ``torch.onnx.export`` takes a program of torch.export's, retraces the whole of it and reads its table anew at
each call: seconds for a region of five nodes, where this takes milliseconds. It also drops what a program writes into
its inputs, and refuses ops of others that write. A region is a graph of values already (``dlinfer.graph.functional``),
so only the table and the translation are used. ``tests/graph/test_what_torch_offers.py`` shows all of this.
"""

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
    """node: name of the node that the exporter could not translate. reason: why."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


class Registry:
    """The exporter's table from torch's ops to functions that write ONNX, with ours before its own.

    guards: functions that take the arguments of a call and raise where the exporter's own function is wrong for it.
    """

    def __init__(
        self,
        opset: int,
        ours: Mapping[Any, Callable[..., Any]],
        guards: Mapping[OpOverload, Callable[..., None]] | None = None,
    ) -> None:
        from torch.onnx._internal.exporter import _registration

        self.opset = opset
        table = _torch_table(opset)
        self._table = _registration.ONNXRegistry()
        self._table._opset_version = opset
        self._table.functions = {name: list(functions) for name, functions in table.functions.items()}
        for op, guard in (guards or {}).items():
            for entry in self._table.get_decomps(op)[:1]:
                self._register(op, _guarded(guard, entry.onnx_function))
        for op, function in ours.items():
            self._register(op, function)
        # What our own leave out is theirs to know.
        self._unread: dict[str, frozenset[str]] = {
            op.name(): frozenset() for op in ours if isinstance(op, OpOverload)
        }

    def _register(self, op: Any, function: Callable[..., Any]) -> None:
        from torch.onnx._internal.exporter import _registration

        meta = _registration.OnnxDecompMeta(
            onnx_function=function,
            fx_target=op,
            signature=None,
            is_custom=True,
            skip_signature_inference=True,
        )
        self._table._register(op, meta)

    def knows(self, target: Any) -> bool:
        """Whether calls of ``target`` have a translation."""
        return any(not entry.is_complex for entry in self._table.get_decomps(target))

    def unread(self, op: OpOverload) -> frozenset[str]:
        """The parameters of an op that the exporter's own translation of it never reads. Ours read what matters."""
        name = op.name()
        if name not in self._unread:
            entries = [entry for entry in self._table.get_decomps(op) if not entry.is_complex]
            functions = [_python_function(entry.onnx_function) for entry in entries[:1]]
            self._unread[name] = frozenset().union(*map(_never_loaded, functions))
        return self._unread[name]

    @functools.cached_property
    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """torch's decompositions of the ops that have no translation."""
        from torch.onnx._internal.exporter import _decomp

        known = set(_decomp.get_onnx_implemented_overloads(self._table))
        return dict(_decomp.create_onnx_friendly_decomposition_table(known))

    def translate(self, graph: fx.Graph, name: str) -> Any:
        """The graph, whose nodes carry fakes, as an ``onnx_ir.Model``. Raises UntranslatableError."""
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
            found = re.search(r"translating node %(\w+)", str(error))
            raise UntranslatableError(found.group(1) if found else "", _cause(error)) from error
        model.opset_imports[""] = self.opset
        _ir_passes.add_opset_imports(model)
        model.opset_imports[""] = self.opset
        return model


def _guarded(guard: Callable[..., None], function: Callable[..., object]) -> Callable[..., Any]:
    def called(*args: object, **kwargs: object) -> Any:
        guard(*args, **kwargs)
        return function(*args, **kwargs)

    called.__wrapped__ = function  # pyright: ignore[reportFunctionMemberAccess]
    return called


def _python_function(function: object) -> Callable[..., Any]:
    """The Python function of a translation: onnxscript wraps it, as a script or to be traced."""
    while not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        function = next(
            getattr(function, name) for name in ("__wrapped__", "func", "function") if hasattr(function, name)
        )
    return function


def _never_loaded(function: Callable[..., object]) -> set[str]:
    """The parameters of a function whose code never loads them."""
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

    # It says of each op of packages that are not installed (torchvision) that it is skipped.
    logger = logging.getLogger(_registration.__name__)
    with _lock:  # one puts the level back before another looks at it
        before = logger.level
        logger.setLevel(logging.ERROR)  # not by assignment: a logger remembers what it has let pass
        try:
            return _registration.ONNXRegistry.from_torchlib(opset)
        finally:
            logger.setLevel(before)


def onnx_type(dtype: torch.dtype) -> int | None:
    """ONNX's number of a dtype; None where ONNX has no such type."""
    from torch.onnx._internal.exporter import _core

    found = _core._TORCH_DTYPE_TO_ONNX.get(dtype)
    return None if found is None else int(found)
