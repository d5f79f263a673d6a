"""Build an OpenVINO model from a pure function (``graph.functional``): translate (lower) its graph node by node.

After each node the builder checks the type and rank of the result. So the engine refuses a region with a wrong
lowering, and does not compute wrong numbers. Sizes are i64 scalars of the model, or Python numbers if they are
fixed."""

from collections.abc import Sequence
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Output
from openvino.op import Constant
from torch import Tensor, fx

from dlinfer.graph.engine_kit.refused import RefusedError
from dlinfer.graph.ir.dialect import attribute, fake
from dlinfer.graph.torch_private.symbols import fixed_size, size_range
from dlinfer.vendor.openvino import dtypes
from dlinfer.vendor.openvino.dtypes import KEPT, SHORT
from dlinfer.vendor.openvino.int_ranges.kept import range_of
from dlinfer.vendor.openvino.registry import Call, lowering
from dlinfer.vendor.openvino.written import InPlace, Rows

Size = int | Output

INDEX = "an index out of range"
"""The reason of the only fault that is an error in torch too."""

_WITHIN_16_BITS = (ov.Type.boolean, ov.Type.i8, ov.Type.u8, ov.Type.i16)


class LoweringError(RefusedError):
    """A node cannot be written in OpenVINO's opset."""


class Builder:
    """Writes OpenVINO's ops and constants for the nodes of a graph.

    call: the node's call that is being lowered.
    values: node -> its value in the model. keep: memory of the model's constants. notes: for reports.
    limits: index inputs to check before the model runs. A key is (name of the index input, text of the fake tensor's
        size in the indexed dimension, whether negative indices count from the end). A value is the bound for the
        indices: a number, or (name of an input, dimension) for that dimension's size at run time.
    places: index tensors that the model itself checks (``lowerings.places``).
    faults: reason -> bool tensors; if one is true, torch has to run the graph instead.
    sums: (reason, type, rank) -> sums of elements; if one is NaN, torch has to run the graph instead."""

    call: Call

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.keep: list[Tensor] = []
        self.notes: list[str] = []
        self.limits: dict[tuple[str, str, bool], int | tuple[str, int]] = {}
        self.places: dict[Any, Output] = {}
        self.faults: dict[str, list[Output]] = {}
        self.sums: dict[tuple[str, str, int], list[Output]] = {}

    # --- nodes

    def placeholder(self, node: fx.Node) -> Output:
        """Add a parameter for an input, with its dtype and fixed sizes."""
        value = fake(node)
        if isinstance(value, Tensor):
            sizes = [-1 if (size := fixed_size(symbol)) is None else size for symbol in value.shape]
            kind = dtypes.type_of(value.dtype)
        else:
            sizes, kind = [], ov.Type.f32 if isinstance(value, (float, torch.SymFloat)) else ov.Type.i64
        parameter = op.parameter(ov.PartialShape(sizes), kind, name=node.name)
        self.values[node] = parameter.output(0)
        return self.values[node]

    def lower(self, node: fx.Node) -> None:
        """Lower one node. Raises LoweringError."""
        if node.op == "get_attr":
            owner = node.graph.owning_module
            assert owner is not None
            try:
                self.values[node] = self.constant(attribute(owner, str(node.target)))
            except LoweringError as cause:
                cause.node = next((user.name for user in node.users), node.name)
                raise
            return
        self.call = Call.of(node)
        entry = lowering(node.target)
        if entry is None:
            raise LoweringError(f"the engine has no lowering for {self.call.name}", node.name)
        if _without_elements(self.call.result):  # the plugin divides by such sizes
            if self.call.name.removeprefix("aten.").startswith(("scatter", "index_", "embedding")):
                raise LoweringError("torch checks the indices even of a tensor without elements", node.name)
            self.values[node] = self.constant(
                torch.empty([int(size) for size in self.result.shape], dtype=self.result.dtype)
            )
            return
        resolve = self.values.__getitem__ if entry.takes_rows else self.assembled
        arguments = {name: _mapped(argument, resolve) for name, argument in self.call.arguments.items()}
        try:
            results = entry.build(self, *entry.by_position(arguments), **entry.by_name(arguments))
        except LoweringError as cause:
            cause.node = cause.node or node.name
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as cause:
            first = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
            raise LoweringError(f"OpenVINO: {type(cause).__name__}: {first}"[:400], node.name) from cause
        self.values[node] = self._checked(node, results)

    def outputs_of(self, node: fx.Node) -> list[Output]:
        """Return all outputs of a lowered node, also those inside lists and inside ``Rows``."""
        value = self.values[node]
        parts = value if isinstance(value, (list, tuple)) else [value]
        kept = [
            output
            for part in parts
            for output in ((part.source, part.index) if isinstance(part, Rows) else (part,))
        ]
        return [output for output in kept if isinstance(output, Output)]

    def assembled(self, node: fx.Node) -> Any:
        """Return a node's value: an output, a Python number, or a list of these.

        ``written.Rows`` is a tensor kept in parts: the old tensor, and new rows that replace some of its rows. This
        first builds the whole tensor from the parts.
        """
        value = self.values[node]
        if isinstance(value, InPlace):
            raise LoweringError("an input is read after the model has written it in place", node.name)
        if isinstance(value, Rows):
            if value.full is None:
                self.notes.append(
                    f"{node.name} is copied at each call: ops other than attention read all of it"
                )
            return value.whole()
        return value

    def _checked(self, node: fx.Node, results: Any) -> Any:
        value = fake(node)
        if isinstance(value, (list, tuple)):
            return [self._fitting(node, result, part) for result, part in zip(results, value, strict=True)]
        return self._fitting(node, results, value)

    def _fitting(self, node: fx.Node, output: Any, value: Any) -> Any:
        if hasattr(output, "output") and not isinstance(output, Output):
            output = output.output(0)
        if not isinstance(output, Output) or not isinstance(value, Tensor):  # a size, or a written input
            return output
        if output.get_element_type() != dtypes.type_of(value.dtype):
            raise LoweringError(
                f"OpenVINO changes its dtype to {output.get_element_type().get_type_name()}", node.name
            )
        rank = output.get_partial_shape().rank
        if rank.is_static and rank.get_length() != value.dim():
            raise LoweringError(f"OpenVINO changes its rank to {rank.get_length()}", node.name)
        if output.get_node().get_friendly_name().split("_")[0] == output.get_node().get_type_name():
            output.get_node().set_friendly_name(node.name)
        return output

    # --- constants

    def constant(self, tensor: Tensor) -> Output:
        """Return a constant for a tensor of the graph, without a copy if the tensor is contiguous."""
        held = tensor.detach().contiguous()
        if held.dtype is torch.int64 and not KEPT.holds(range_of(held)):
            raise LoweringError(_TOO_LARGE)
        return dtypes.constant(held, self.keep)

    def scalar(self, value: float, kind: ov.Type) -> Output:
        """Return a number as a constant of rank 0."""
        if kind in SHORT:  # OpenVINO takes no infinity of 16 bits, and rounds differently
            return self.constant(torch.tensor(value, dtype=SHORT[kind]))
        if kind == ov.Type.i64 and not KEPT.holds((value, value)):
            raise LoweringError(_TOO_LARGE)
        value = value != 0 if kind == ov.Type.boolean else value
        return Constant(kind, ov.Shape([]), [value]).output(0)

    def full(self, number: Any, sizes: Any) -> Output:
        """Fill a tensor of the result's dtype with a number.

        The broadcast has the mode EXPLICIT. OpenVINO moves sums and products through broadcasts of other modes. If a
        size is 0, the result then wrongly has size 1 there."""
        return op.broadcast(self.cast(number, self.kind), sizes, self.axes([]), "EXPLICIT").output(0)

    def axes(self, values: Sequence[int]) -> Output:
        return Constant(ov.Type.i64, ov.Shape([len(values)]), list(values)).output(0)

    # --- tensors and numbers

    @property
    def result(self) -> Tensor:
        """The fake tensor of the only result of ``call``."""
        return self.call.result

    @property
    def kind(self) -> ov.Type:
        """OpenVINO's type of the only result of ``call``."""
        return dtypes.type_of(self.call.result.dtype)

    def cast(self, value: Any, kind: ov.Type) -> Output:
        """Convert a tensor or number to a tensor of a type."""
        if not isinstance(value, Output):
            return self.scalar(value, kind)
        source = value.get_element_type()
        if source == kind:
            return value
        if kind == ov.Type.boolean:  # Convert would make NaN and -(2**31) false
            return op.not_equal(value, self.scalar(0, source)).output(0)
        if kind == ov.Type.i64 and source.is_real():
            self._cast_fault(value)
        if kind == ov.Type.i16 and source not in _WITHIN_16_BITS:
            return self._wrapped(value)
        return op.convert(value, kind).output(0)

    def _wrapped(self, value: Output) -> Output:
        """Wrap integers around to 16 bits, as torch does: the plugin stores i16 in 32 bits."""
        wide, bits = self.cast(value, ov.Type.i32), self.scalar(16, ov.Type.i32)
        return op.convert(
            op.bitwise_right_shift(op.bitwise_left_shift(wide, bits), bits), ov.Type.i16
        ).output(0)

    def _cast_fault(self, value: Output) -> None:
        """Let torch run the graph instead if ``value`` has NaN, or numbers of ``KEPT.cast`` or more.

        value: floats that ``cast`` converts to int64.
        """
        inside = op.less(op.abs(self.cast(value, ov.Type.f32)), self.scalar(float(KEPT.cast), ov.Type.f32))
        self.fault(
            op.logical_not(inside).output(0),
            f"it casts NaN, or a float of {KEPT.cast} or more, to a 64-bit integer",
        )

    def fault(self, condition: Output, reason: str) -> None:
        """Let torch run the graph instead whenever ``condition``, a bool tensor, is true anywhere."""
        axes = list(range(len(condition.get_partial_shape())))
        self.faults.setdefault(reason, []).append(
            op.reduce_logical_or(condition, self.axes(axes), False).output(0) if axes else condition
        )

    def nan_fault(self, x: Output, reason: str) -> None:
        """Let torch run the graph instead whenever an element of x is NaN. Costs one node."""
        axes = self.axes(list(range(len(x.get_partial_shape()))))
        alike = (reason, x.get_element_type().get_type_name(), len(x.get_partial_shape()))
        self.sums.setdefault(alike, []).append(op.reduce_sum(x, axes, True).output(0))

    def found_faults(self) -> dict[str, Output]:
        """Return reason -> a bool scalar of the model, which is true if torch has to run the graph instead."""
        for (reason, _, _), sums in self.sums.items():
            self.fault(op.is_nan(op.concat(sums, 0)).output(0), reason)
        combined: dict[str, Output] = {}
        for reason, bools in self.faults.items():
            combined[reason] = bools[0]
            for condition in bools[1:]:
                combined[reason] = op.logical_or(combined[reason], condition).output(0)
        return combined

    def select(self, condition: Output, x: Any, y: Any, kind: ov.Type) -> Output:
        """Select x where the condition is true, else y, both converted to a type."""
        x, y = self.cast(x, kind), self.cast(y, kind)
        if kind == ov.Type.boolean:  # the CPU plugin fails to compile a Select of bools by one of them
            left = op.logical_and(condition, x)
            return op.logical_or(left, op.logical_and(op.logical_not(condition), y)).output(0)
        return op.select(condition, x, y).output(0)

    # --- sizes

    def size(self, x: Output, dim: int) -> Size:
        sizes = x.get_partial_shape()
        known = sizes[dim % len(sizes)]
        if known.is_static:
            return known.get_length()
        shape = op.shape_of(x, "i64")
        return op.gather(
            shape, self.scalar(dim % len(sizes), ov.Type.i64), self.scalar(0, ov.Type.i64)
        ).output(0)

    def numbers(self, sizes: Sequence[Size]) -> Output:
        """Return sizes as one i64 tensor."""
        if all(isinstance(size, int) for size in sizes):
            return self.axes([int(size) for size in sizes])  # pyright: ignore[reportArgumentType]
        parts = [self.axes([size]) if isinstance(size, int) else self.single(size) for size in sizes]
        return parts[0] if len(parts) == 1 else op.concat(parts, 0).output(0)

    def single(self, number: Any) -> Output:
        if not isinstance(number, Output):
            return self.axes([int(number)])
        return op.reshape(self.cast(number, ov.Type.i64), self.axes([1]), False).output(0)

    def shaped(self, x: Output, old: Sequence[Any], new: Sequence[Any], sizes: Sequence[Size]) -> Output:
        """Reshape ``x``. sizes: the new sizes as values of the model. old, new: the sizes of the fake tensors.

        OpenVINO's Reshape can copy sizes by position and infer one more. If that is enough, no size is computed at run
        time."""
        written: list[int] = []
        for index, size in enumerate(new):
            same = index < len(old) and str(old[index]) == str(size) and size_range(size)[0] >= 1
            fixed = fixed_size(size)
            written.append(fixed if fixed is not None else 0 if same else -1)
        fixed_zero = any(fixed_size(size) == 0 for size in (*new, *old))
        follows = -1 not in written or (
            written.count(-1) == 1 and all(size_range(size)[0] >= 1 for size in old)
        )
        if follows and not fixed_zero:
            return op.reshape(x, self.axes(written), True).output(0)
        return op.reshape(x, self.numbers(sizes), False).output(0)


_TOO_LARGE = "a 64-bit constant needs more than 32 bits, but OpenVINO keeps only 32"


def _without_elements(result: Any) -> bool:
    """Return whether a call's result is one tensor of fixed sizes without elements."""
    if not isinstance(result, Tensor):
        return False
    sizes = list(map(fixed_size, result.shape))
    return 0 in sizes and None not in sizes


def _mapped(argument: Any, resolve: Any) -> Any:
    if isinstance(argument, fx.Node):
        return resolve(argument)
    if isinstance(argument, (list, tuple)):
        return [_mapped(item, resolve) for item in argument]
    return argument
