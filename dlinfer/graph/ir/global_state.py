"""Torch's global state that a compiled graph depends on: recorded at compile time, compared at each call.

Autocast and the recording of gradients are settings of the calling thread. A graph always runs with both off, because
the casts that autocast inserted at capture are nodes of the graph. The default dtype and deterministic algorithms are
settings of the process. A call is refused if a changed setting of the process would change the graph's results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from dlinfer.errors import TorchStateChangedError
from dlinfer.graph.ir.device import autocast
from dlinfer.graph.ir.dialect import arguments, overload, tensors_of
from dlinfer.graph.torch_private.thread_state import is_autocast_enabled, run_plain

T = TypeVar("T")


@dataclass(frozen=True)
class GlobalState:
    """Torch's settings while a graph was compiled.

    deterministic: whether torch must use deterministic algorithms.
    deterministic_warns: whether torch only warns, and does not raise, if an op has no deterministic algorithm.
    fills_uninitialized: whether ``empty`` fills its memory while deterministic algorithms are on.
    autocast: device type -> dtype, for devices with autocast on.
    """

    default_dtype: str
    deterministic: bool
    deterministic_warns: bool
    fills_uninitialized: bool
    autocast: Mapping[str, str]

    @classmethod
    def now(cls) -> "GlobalState":
        """Return the current settings of this thread and its process."""
        return cls(
            default_dtype=str(torch.get_default_dtype()),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
            fills_uninitialized=_fills_uninitialized(),
            autocast=autocast(),
        )


def _fills_uninitialized() -> bool:
    settings: Any = torch.utils.deterministic  # which torch does not type
    return settings.fill_uninitialized_memory


class Requirement:
    """The settings of the process that a graph needs, and their check at each call."""

    def __init__(self, state: GlobalState, reads_default_dtype: bool) -> None:
        self.state = state
        self.reads_default_dtype = reads_default_dtype
        self._dtype = dtype_named(state.default_dtype) if reads_default_dtype else None

    @classmethod
    def of(cls, graph: fx.Graph) -> "Requirement":
        return cls(GlobalState.now(), reads_default_dtype(graph))

    def run(self, program: Callable[..., T], inputs: Sequence[object]) -> T:
        """Run a graph's program with autocast off and without recording gradients.

        Raises TorchStateChangedError if a process-wide setting of torch would change the graph's results.
        """
        if self._dtype is not None and torch.get_default_dtype() is not self._dtype:
            self.check_default_dtype()
        if torch.are_deterministic_algorithms_enabled():
            self._check_deterministic()
        if torch.is_grad_enabled() or is_autocast_enabled():
            return run_plain(program, inputs)
        return program(*inputs)

    def check_default_dtype(self) -> None:
        """Raise TorchStateChangedError if the graph reads the default dtype, and that dtype has changed."""
        now = torch.get_default_dtype()
        if self._dtype is not None and now is not self._dtype:
            raise TorchStateChangedError(what="the default dtype", compiled_for=self._dtype, given=now)

    def _check_deterministic(self) -> None:
        if not self.state.deterministic:
            raise TorchStateChangedError(what="deterministic algorithms", compiled_for="off", given="on")
        if _fills_uninitialized() and not self.state.fills_uninitialized:
            raise TorchStateChangedError(what="fill_uninitialized_memory", compiled_for="off", given="on")

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self.state), "reads_default_dtype": self.reads_default_dtype}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Requirement":
        """Return the requirement that ``to_dict`` wrote. Raises KeyError, TypeError or ValueError for other data."""
        fields = dict(data)
        reads = bool(fields.pop("reads_default_dtype"))
        dtype_named(fields["default_dtype"])
        return cls(GlobalState(**fields), reads)


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with this name, such as ``torch.float16``. Raises ValueError if there is none."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name[:40]!r} is not a dtype")
    return dtype


def explicit_dtypes(graph: fx.Graph) -> None:
    """Write the dtype into calls that would use the default dtype: ``rand``, ``zeros``, ``arange``."""
    for node in graph.nodes:
        op = overload(node)
        if op is None or op.namespace != "aten" or not _is_float_of_no_float(node):
            continue
        if arguments(node).get("dtype", "no such parameter") is None:
            node.kwargs = {**node.kwargs, "dtype": tensors_of(node)[0].dtype}


def reads_default_dtype(graph: fx.Graph) -> bool:
    """Return whether some node's result may depend on the default dtype.

    - An ATen op may depend on it if the result is floating-point, no argument is, and the call has no ``dtype``.
    - An op of another library may depend on it if the op returns a tensor. dlinfer's ops never do.
    """
    return any(_reads_default_dtype(node) for node in graph.nodes if node.op == "call_function")


def _reads_default_dtype(node: fx.Node) -> bool:
    op = overload(node)
    if op is None:
        return bool(tensors_of(node)) and not isinstance(node.target, type(getattr))
    if op.namespace not in ("aten", "prims"):
        return op.namespace != "dlinfer" and bool(tensors_of(node))
    return _is_float_of_no_float(node) and arguments(node).get("dtype") is None


def _is_float_of_no_float(node: fx.Node) -> bool:
    read = [tensor for parent in node.all_input_nodes for tensor in tensors_of(parent)]
    return any(map(_is_float, tensors_of(node))) and not any(map(_is_float, read))


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
