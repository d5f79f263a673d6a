"""From a pure function (``graph.functional``) to an OpenVINO model: one lowering after the other.

Every value has OpenVINO's type of its torch dtype and its rank; that is checked behind each lowering, so that a fault
in one shows as a refused region and not as a wrong number. Sizes are i64 scalars, or Python numbers where known.
"""

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

INDEX = "an index outside of what it indexes"
"""A fault for which torch raises."""

_WITHIN_16_BITS = (ov.Type.boolean, ov.Type.i8, ov.Type.u8, ov.Type.i16)


class LoweringError(RefusedError):
    """A node cannot be written in OpenVINO's opset."""


class Builder:
    """What lowerings write with. ``call`` is the call that is being lowered.

    keep: memory that constants of the model lie in.
    limits: (input that is an index, size as a fake, whether it counts from the end) -> the size, or (input, dimension).
    places: indices that the model has looked at (``lowerings.places``).
    faults: reason -> bools, any of which says that the model is not right for what it was given.
    sums: (reason, type, rank) -> sums of elements, of which a NaN says so.
    """

    call: Call

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.keep: list[Tensor] = []
        self.notes: list[str] = []
        self.limits: dict[tuple[str, str, bool], int | tuple[str, int]] = {}
        self.places: dict[Any, Output] = {}
        self.faults: dict[str, list[Output]] = {}
        self.sums: dict[tuple[str, str, int], list[Output]] = {}

    # --- walking

    def placeholder(self, node: fx.Node) -> Output:
        """A parameter for an input, of its dtype and the sizes that are fixed."""
        value = fake(node)
        if isinstance(value, Tensor):
            sizes = [-1 if (size := fixed_size(one)) is None else size for one in value.shape]
            kind = dtypes.type_of(value.dtype)
        else:
            sizes, kind = [], ov.Type.f32 if isinstance(value, (float, torch.SymFloat)) else ov.Type.i64
        made = op.parameter(ov.PartialShape(sizes), kind, name=node.name)
        self.values[node] = made.output(0)
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
        found = lowering(node.target)
        if found is None:
            raise LoweringError(f"no lowering for {self.call.name}", node.name)
        if _without_elements(self.call.result):  # the plugin divides by such sizes
            if self.call.name.removeprefix("aten.").startswith(("scatter", "index_", "embedding")):
                raise LoweringError("torch looks at indices of no elements too", node.name)
            self.values[node] = self.constant(
                torch.empty([int(size) for size in self.result.shape], dtype=self.result.dtype)
            )
            return
        resolve = self.values.__getitem__ if found.takes_rows else self.assembled
        given = {name: _mapped(argument, resolve) for name, argument in self.call.given.items()}
        try:
            made = found.build(self, *found.by_position(given), **found.by_name(given))
        except LoweringError as cause:
            cause.node = cause.node or node.name
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as cause:
            first = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
            raise LoweringError(f"OpenVINO: {type(cause).__name__}: {first}"[:400], node.name) from cause
        self.values[node] = self._checked(node, made)

    def outputs_of(self, node: fx.Node) -> list[Output]:
        """The outputs that a lowered node became, in whatever they are kept."""
        found = self.values[node]
        parts = found if isinstance(found, (list, tuple)) else [found]
        kept = [
            one
            for part in parts
            for one in ((part.source, part.index) if isinstance(part, Rows) else (part,))
        ]
        return [one for one in kept if isinstance(one, Output)]

    def assembled(self, node: fx.Node) -> Any:
        """What a node became, with Rows put into place: an output, a Python number, or a list of these."""
        found = self.values[node]
        if isinstance(found, InPlace):
            raise LoweringError("an input that the model writes in place is read after it", node.name)
        if isinstance(found, Rows):
            if found.full is None:
                self.notes.append(
                    f"{node.name} is copied at each call: other ops than attention read it whole"
                )
            return found.whole()
        return found

    def _checked(self, node: fx.Node, made: Any) -> Any:
        value = fake(node)
        if isinstance(value, (list, tuple)):
            return [self._fitting(node, one, part) for one, part in zip(made, value, strict=True)]
        return self._fitting(node, made, value)

    def _fitting(self, node: fx.Node, made: Any, value: Any) -> Any:
        if hasattr(made, "output") and not isinstance(made, Output):
            made = made.output(0)
        if not isinstance(made, Output) or not isinstance(value, Tensor):  # a size, or a written input
            return made
        if made.get_element_type() != dtypes.type_of(value.dtype):
            raise LoweringError(f"it became {made.get_element_type().get_type_name()}", node.name)
        rank = made.get_partial_shape().rank
        if rank.is_static and rank.get_length() != value.dim():
            raise LoweringError(f"its rank became {rank.get_length()}", node.name)
        if made.get_node().get_friendly_name().split("_")[0] == made.get_node().get_type_name():
            made.get_node().set_friendly_name(node.name)
        return made

    # --- constants

    def constant(self, tensor: Tensor) -> Output:
        """A tensor of the graph, on its own memory where it is contiguous."""
        held = tensor.detach().contiguous()
        if held.dtype is torch.int64 and not KEPT.holds(range_of(held)):
            raise LoweringError(_TOO_LARGE)
        return dtypes.constant(held, self.keep)

    def scalar(self, value: float, kind: ov.Type) -> Output:
        """A number as a constant of rank 0."""
        if kind in SHORT:  # OpenVINO takes no infinity for them, and rounds in its own way
            return self.constant(torch.tensor(value, dtype=SHORT[kind]))
        if kind == ov.Type.i64 and not KEPT.holds((value, value)):
            raise LoweringError(_TOO_LARGE)
        value = value != 0 if kind == ov.Type.boolean else value
        return Constant(kind, ov.Shape([]), [value]).output(0)

    def full(self, number: Any, sizes: Any) -> Output:
        """One number everywhere, in a tensor of the call's dtype.

        OpenVINO moves a sum or product through any other broadcast, and then takes the larger of sizes 0 and 1.
        """
        return op.broadcast(self.cast(number, self.kind), sizes, self.axes([]), "EXPLICIT").output(0)

    def axes(self, values: Sequence[int]) -> Output:
        """A list of fixed whole numbers."""
        return Constant(ov.Type.i64, ov.Shape([len(values)]), list(values)).output(0)

    # --- tensors and numbers

    @property
    def result(self) -> Tensor:
        """The fake of the one tensor that the call gives."""
        return self.call.result

    @property
    def kind(self) -> ov.Type:
        """OpenVINO's type of the one tensor that the call gives."""
        return dtypes.type_of(self.call.result.dtype)

    def cast(self, value: Any, kind: ov.Type) -> Output:
        """A tensor or number as a tensor of a type."""
        if not isinstance(value, Output):
            return self.scalar(value, kind)
        given = value.get_element_type()
        if given == kind:
            return value
        if kind == ov.Type.boolean:  # so that NaN is true, and -(2**31), for which Convert says otherwise
            return op.not_equal(value, self.scalar(0, given)).output(0)
        if kind == ov.Type.i64 and given.is_real():
            self._cast_fault(value, given)
        if kind == ov.Type.i16 and given not in _WITHIN_16_BITS:
            return self._wrapped(value)
        return op.convert(value, kind).output(0)

    def _wrapped(self, value: Output) -> Output:
        """A number of 16 bits, as torch wraps a wider one around. The plugin keeps i16 as 32 bits."""
        wide, bits = self.cast(value, ov.Type.i32), self.scalar(16, ov.Type.i32)
        return op.convert(
            op.bitwise_right_shift(op.bitwise_left_shift(wide, bits), bits), ov.Type.i16
        ).output(0)

    def _cast_fault(self, value: Output, kind: ov.Type) -> None:
        """Let the model say whether a float is too large for int64 as the plugin keeps it, or NaN."""
        inside = op.less(op.abs(self.cast(value, ov.Type.f32)), self.scalar(float(KEPT.cast), ov.Type.f32))
        self.fault(
            op.logical_not(inside).output(0),
            f"a float of {KEPT.cast} or more, or NaN, becomes a 64-bit integer",
        )

    def fault(self, found: Output, reason: str) -> None:
        """Let the model say that torch has to run a call: where ``found``, a bool tensor, is true anywhere."""
        axes = list(range(len(found.get_partial_shape())))
        self.faults.setdefault(reason, []).append(
            op.reduce_logical_or(found, self.axes(axes), False).output(0) if axes else found
        )

    def nan_fault(self, x: Output, reason: str) -> None:
        """Let the model say that torch has to run a call: where an element of x is NaN. A layer costs one node."""
        axes = self.axes(list(range(len(x.get_partial_shape()))))
        alike = (reason, x.get_element_type().get_type_name(), len(x.get_partial_shape()))
        self.sums.setdefault(alike, []).append(op.reduce_sum(x, axes, True).output(0))

    def found_faults(self) -> dict[str, Output]:
        """Reason -> a bool, whether the model is not right for what it was given."""
        for (reason, _, _), sums in self.sums.items():
            self.fault(op.is_nan(op.concat(sums, 0)).output(0), reason)
        found: dict[str, Output] = {}
        for reason, bools in self.faults.items():
            found[reason] = bools[0]
            for one in bools[1:]:
                found[reason] = op.logical_or(found[reason], one).output(0)
        return found

    def select(self, condition: Output, x: Any, y: Any, kind: ov.Type) -> Output:
        """x where the condition is true, else y, both as a type."""
        x, y = self.cast(x, kind), self.cast(y, kind)
        if kind == ov.Type.boolean:  # the CPU plugin fails to compile a choice of bools by one of them
            left = op.logical_and(condition, x)
            return op.logical_or(left, op.logical_and(op.logical_not(condition), y)).output(0)
        return op.select(condition, x, y).output(0)

    # --- sizes

    def size(self, x: Output, dim: int) -> Size:
        """The size of one dimension of a tensor."""
        sizes = x.get_partial_shape()
        known = sizes[dim % len(sizes)]
        if known.is_static:
            return known.get_length()
        shape = op.shape_of(x, "i64")
        return op.gather(
            shape, self.scalar(dim % len(sizes), ov.Type.i64), self.scalar(0, ov.Type.i64)
        ).output(0)

    def numbers(self, sizes: Sequence[Size]) -> Output:
        """Sizes as one i64 tensor."""
        if all(isinstance(size, int) for size in sizes):
            return self.axes([int(size) for size in sizes])  # pyright: ignore[reportArgumentType]
        parts = [self.axes([one]) if isinstance(one, int) else self.one(one) for one in sizes]
        return parts[0] if len(parts) == 1 else op.concat(parts, 0).output(0)

    def one(self, number: Any) -> Output:
        """A number as an i64 tensor of one element."""
        if not isinstance(number, Output):
            return self.axes([int(number)])
        return op.reshape(self.cast(number, ov.Type.i64), self.axes([1]), False).output(0)

    def shaped(self, x: Output, old: Sequence[Any], new: Sequence[Any], sizes: Sequence[Size]) -> Output:
        """``x`` reshaped. old, new: its sizes and the wanted ones, as fakes have them; sizes: those as values.

        OpenVINO can copy a size of the same position, and work out one more: then nothing is computed at run time.
        """
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


_TOO_LARGE = "a 64-bit constant beyond 32 bits, which OpenVINO does not keep"


def _without_elements(result: Any) -> bool:
    """Whether a call gives one tensor that has no element, of sizes that are fixed."""
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
