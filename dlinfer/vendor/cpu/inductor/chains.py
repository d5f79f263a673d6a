"""Chains: runs of a program's steps that need no Python, so that one call of C++ (csrc/chain) executes them.

A step can join a chain if it calls a C++ kernel or is a view, and all its arguments are tensors, numbers and dtypes. A
chain runs the same kernels in the same order as its steps. It saves the time that Python and the dispatcher take for
each kernel: some milliseconds for each decoded token of a model of 24 layers. While a chain runs, other Python threads
can run.

A chain is encoded as integers, which ``csrc/chain/chain.cpp`` reads. First come four counts: how many input tensors,
registers, size arguments and calls the chain has. The calls follow, then the registers of the chain's results. A
register holds one tensor during a run. Before each list stands its length."""

import functools
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from dlinfer.graph.ir.layout import LAYOUT
from dlinfer.graph.ir.program import Constant, Joined, Step, Value, values_in
from dlinfer.utils import computing
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor.kernels import places_of

SHORTEST = 3
"""The fewest steps of a chain. Shorter runs are called step by step."""
LONG = 64
"""A chain of at least so many steps, about those of a few layers, announces a long computation (``Chain.is_long``)."""

# Views, and reshape, which copies only if it must. The dispatcher takes longer than their work.
_VIEWS = frozenset(
    "op aten." + name
    for name in "expand.default flatten.using_ints permute.default reshape.default select.int"
    " split_with_sizes.default squeeze.dim transpose.int unflatten.int unsqueeze.default view.default".split()
)
_ITEM = "py operator.getitem"
# Ops that return a list -> the index of the argument with as many items.
_LISTS = {"native linears": 1, "op aten.split_with_sizes.default": 1}

_NONE, _TENSOR, _MAYBE_TENSOR, _INT, _SIZE, _FLOAT, _MAYBE_FLOAT, _BOOL, _DTYPE = range(9)
_TENSORS, _MAYBE_TENSORS, _INTS = range(9, 12)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
"""The dtypes that a step may have as an argument. The code of a dtype is its index here."""
_KERNEL, _DISPATCHED, _CONTIGUOUS = range(3)

_dropped: deque[int] = deque()
"""Handles of chains that no Python object refers to any more. Making the next chain frees their memory."""


class _NotChainableError(Exception):
    """A step cannot join a chain."""


def join(steps: Sequence[Step], kept: Iterable[str]) -> tuple[list[Step], Mapping[str, Callable[..., Any]]]:
    """Replace runs of steps by chains.

    Return the new steps, and a mapping from names to chains. A new step calls its chain by this name (its callee).
    kept: the names of values that are read after the last step.
    """
    if native.why_not() is not None:
        return list(steps), {}
    steps = _items_first(steps)
    last_read = _last_reads(steps, kept)
    joined: list[Step] = []
    calls: dict[str, Callable[..., Any]] = {}
    begin = 0
    while begin < len(steps):
        end, writer = _longest(steps, begin)
        if end - begin < SHORTEST:
            end = max(end, begin + 1)
            joined += steps[begin:end]
        else:
            results = dict.fromkeys(name for step in steps[begin:end] for name in step.names)
            read_later = [name for name in results if last_read.get(name, -1) >= end]
            step, call = writer.joined(read_later, f"chain {len(calls)}")
            joined.append(step)
            calls[step.callee] = call
        begin = end
    return joined, calls


def _longest(steps: Sequence[Step], begin: int) -> "tuple[int, _Writer]":
    """Return the end of the longest chain from ``begin``, and the writer that has encoded the chain's steps."""
    writer = _Writer()
    end = begin
    while end < len(steps) and writer.take(steps[end]):
        end += 1
    # A sequence is no tensor, so its items must all be taken out within the chain.
    while end > begin and writer.leaves_sequence(steps[end:]):
        end -= 1
        writer = _Writer()
        for step in steps[begin:end]:
            writer.take(step)
    return end, writer


def _items_first(steps: Sequence[Step]) -> list[Step]:
    """Return the steps in another order: each getitem comes right after the step whose list of results it indexes."""
    items: dict[str, list[Step]] = {}
    sequences = {name for step in steps if isinstance(step.results, str) for name in step.names}
    for step in steps:
        if _is_item(step) and step.args[0].name in sequences:
            items.setdefault(step.args[0].name, []).append(step)
    moved = {id(step) for group in items.values() for step in group}
    ordered: list[Step] = []

    def put(step: Step) -> None:
        ordered.append(step)
        for item in items.get(step.results, []) if isinstance(step.results, str) else []:
            put(item)

    for step in steps:
        if id(step) not in moved:
            put(step)
    return ordered


def _is_item(step: Step) -> bool:
    return step.callee == _ITEM and isinstance(step.args[0], Value) and isinstance(step.args[1], int)


def _last_reads(steps: Sequence[Step], kept: Iterable[str]) -> dict[str, int]:
    """Return name -> the index of the last step that reads it; len(steps) for names in ``kept``."""
    last = {
        name: index for index, step in enumerate(steps) for name in values_in([step.args, dict(step.kwargs)])
    }
    return last | dict.fromkeys(kept, len(steps))


@dataclass
class _Written:
    """One call in the encoding of a chain.

    head: the encoded callee.
    arguments: the encoded arguments.
    gives_list: whether the call returns a list.
    results, reads: the registers that the call writes and reads.
    part: the step that the call belongs to."""

    head: list[int]
    arguments: list[int]
    gives_list: bool
    results: list[int]
    reads: set[int]
    part: Step


@dataclass
class _Writer:
    """Encodes steps one after another for as long as they can be in a chain."""

    written: list[_Written] = field(default_factory=list)
    # Results are numbered from 0 upwards, inputs from -1 downwards.
    _registers: dict[str, int] = field(default_factory=dict)
    _inputs: list[Value | Constant] = field(default_factory=list)
    _sizes: list[Value] = field(default_factory=list)
    _sequences: dict[str, list[int]] = field(default_factory=dict)
    _next: int = 0
    _reads: set[int] = field(default_factory=set)

    def take(self, step: Step) -> bool:
        """Encode a step; return False, and change nothing, if it cannot join the chain."""
        before = len(self._inputs), len(self._sizes)
        self._reads = set()
        try:
            self._take(step)
        except _NotChainableError:
            for name in self._inputs[before[0] :]:
                del self._registers[_key(name)]
            del self._inputs[before[0] :], self._sizes[before[1] :]
            return False
        return True

    def leaves_sequence(self, following: Sequence[Step]) -> bool:
        """Return whether one of the following steps reads a tuple or list of tensors that this chain computes."""
        return any(
            name in self._sequences
            for step in following
            for name in values_in([step.args, dict(step.kwargs)])
        )

    def _take(self, step: Step) -> None:
        if _is_item(step):
            self._take_item(step)
            return
        if not isinstance(step.results, str):
            raise _NotChainableError
        if step.callee == LAYOUT:
            self._take_layout(step)
            return
        op = _op(step.callee)
        call = _KERNEL if step.callee.startswith("native ") else _DISPATCHED
        name = op._schema.name if call == _DISPATCHED else op._schema.name.partition("::")[2]
        head = [call, *_text(name), *_text(op._schema.overload_name)]
        arguments = [len(op._schema.arguments)]
        for formal, value in _bound(op, step):
            arguments += self._argument(_kind(formal), value)
        returns = [str(result.type) for result in op._schema.returns]
        if returns == ["List[Tensor]"] and step.callee in _LISTS:
            self._write(step, head, arguments, True, len(step.args[_LISTS[step.callee]]))
        elif all(result == "Tensor" for result in returns):
            self._write(step, head, arguments, False, len(returns))
        else:
            raise _NotChainableError

    def _take_layout(self, step: Step) -> None:
        """Encode a call of ``graph.ir.layout.laid_out``, which copies a tensor unless its layout is right."""
        source, order = step.args
        argument = self._argument("Tensor", source)
        if order is not None:
            argument = [_TENSOR, self._permute(step, argument, order)]
        self._write(step, [_CONTIGUOUS, 0, 0], [1, *argument], False, 1)
        if order is not None:
            inverse = sorted(range(len(order)), key=order.__getitem__)
            name = str(step.results)
            self._reads = {self._registers[name]}
            self._registers[name] = self._permute(step, [_TENSOR, self._registers[name]], inverse)

    def _permute(self, step: Step, argument: list[int], order: Sequence[int]) -> int:
        sizes = [number for dim in order for number in (_INT, dim)]
        head = [_DISPATCHED, *_text("aten::permute"), *_text("")]
        register = self._write_unnamed(step, head, [2, *argument, _INTS, len(order), *sizes], False, 1)[0]
        self._reads = {register}
        return register

    def _take_item(self, step: Step) -> None:
        source, index = step.args
        registers = self._sequences.get(source.name)
        if registers is None or not -len(registers) <= index < len(registers):
            raise _NotChainableError
        self._registers[str(step.results)] = registers[index]

    def _write_unnamed(
        self, step: Step, head: list[int], arguments: list[int], gives_list: bool, count: int
    ) -> list[int]:
        results = list(range(self._next, self._next + count))
        self._next += count
        self.written.append(_Written(head, arguments, gives_list, results, self._reads, step))
        return results

    def _write(self, step: Step, head: list[int], arguments: list[int], gives_list: bool, count: int) -> None:
        results = self._write_unnamed(step, head, arguments, gives_list, count)
        name = str(step.results)
        self._registers.pop(name, None)
        self._sequences.pop(name, None)
        if gives_list or count > 1:
            self._sequences[name] = results
        elif count == 1:
            self._registers[name] = results[0]

    def _argument(self, kind: str, value: Any) -> list[int]:
        match kind, value:
            case ("Optional[Tensor]" | "Optional[float]", None):
                return [_NONE, 0]
            case ("Tensor" | "Optional[Tensor]", Value() | Constant()):
                return [_TENSOR if kind == "Tensor" else _MAYBE_TENSOR, self._tensor(value)]
            case (("List[Tensor]" | "List[Optional[Tensor]]"), list() | tuple()):
                inner = kind[5:-1]
                items = [number for item in value for number in self._argument(inner, item)]
                return [_TENSORS if inner == "Tensor" else _MAYBE_TENSORS, len(value), *items]
            case ("List[int]", list() | tuple()):
                items = [number for item in value for number in self._argument("int", item)]
                return [_INTS, len(value), *items]
            case ("ScalarType", torch.dtype()) if value in _DTYPES:
                return [_DTYPE, _DTYPES.index(value)]
            case ("bool", bool()):
                return [_BOOL, int(value)]
            case ("int", Value()):
                return [_SIZE, self._size(value)]
            case ("int", int()) if abs(value) < 1 << 63:
                return [_INT, int(value)]
            case ("float" | "Optional[float]", int() | float()):
                bits = struct.unpack("<q", struct.pack("<d", value))[0]
                return [_FLOAT if kind == "float" else _MAYBE_FLOAT, bits]
            case _:
                raise _NotChainableError

    def _tensor(self, value: Value | Constant) -> int:
        """Return the register of a tensor. An input of the chain has a negative number, which ``joined`` replaces."""
        key = _key(value)
        if key in self._sequences:
            raise _NotChainableError
        if key not in self._registers:
            self._inputs.append(value)
            self._registers[key] = -len(self._inputs)
        self._reads.add(self._registers[key])
        return self._registers[key]

    def _size(self, value: Value) -> int:
        if value not in self._sizes:
            self._sizes.append(value)
        return self._sizes.index(value)

    # --- the whole chain

    def joined(self, read_later: Iterable[str], callee: str) -> tuple[Step, Callable[..., Any]]:
        """Return the step that replaces all encoded steps, and the chain that this step calls.

        read_later: names of the values that later steps read. The chain returns only these."""
        names = tuple(name for name in read_later if name in self._registers)
        results = [self._registers[name] for name in names]
        code = self._code(results)
        step = Joined(
            names,
            "chain",
            callee,
            ([*self._inputs], [*self._sizes]),
            {},
            self.written[0].part.line,
            parts=tuple(written.part for written in self.written),
        )
        return step, Chain(code, is_long=len(self.written) >= LONG)

    def _code(self, results: list[int]) -> list[int]:
        inputs = len(self._inputs)

        def place(register: int) -> int:
            return inputs + register if register >= 0 else -register - 1

        last: dict[int, int] = {}
        for index, entry in enumerate(self.written):
            for register in (*entry.reads, *entry.results):
                last[register] = index
        code = [inputs, inputs + self._next, len(self._sizes), len(self.written)]
        for index, entry in enumerate(self.written):
            done = [place(r) for r, at in last.items() if at == index and r not in results]
            code += [*entry.head, *_placed(entry.arguments, place), int(entry.gives_list)]
            code += _listed(map(place, entry.results)) + _listed(done)
        return code + _listed(map(place, results))


def _placed(arguments: list[int], place: Callable[[int], int]) -> list[int]:
    """Return encoded arguments with each register replaced by ``place(register)``, its number in the complete chain."""
    placed, at = [arguments[0]], 1
    while at < len(arguments):
        kind, value = arguments[at], arguments[at + 1]
        placed += [kind, place(value) if kind in (_TENSOR, _MAYBE_TENSOR) else value]
        at += 2
    return placed


def _listed(numbers: Iterable[int]) -> list[int]:
    numbers = list(numbers)
    return [len(numbers), *numbers]


def _text(text: str) -> list[int]:
    return _listed(text.encode())


def _key(value: Value | Constant) -> str:
    """Return the name of a value or constant. A constant's has a prefix, because a value may have the same name."""
    return value.name if isinstance(value, Value) else f"constant {value.name}"


def _kind(formal: Any) -> str:
    """Return the type of an argument in an op's signature.

    For a dtype torch's ``type`` is "int"; here it is "ScalarType".
    """
    return "ScalarType" if str(formal.real_type) == "ScalarType" else str(formal.type)


@functools.cache
def _op_of(callee: str) -> torch._ops.OpOverload | None:
    kind, _, name = callee.partition(" ")
    if kind == "native":
        return getattr(torch.ops.dlinfer_cpu, name).default
    if callee in _VIEWS:
        namespace, packet, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return None


def _op(callee: str) -> torch._ops.OpOverload:
    op = _op_of(callee)
    if op is None:
        raise _NotChainableError
    return op


def _bound(op: torch._ops.OpOverload, step: Step) -> Iterable[tuple[Any, Any]]:
    """Yield each argument of the op's signature, paired with its value in the step."""
    kind, _, name = step.callee.partition(" ")
    places = places_of(name) if kind == "native" else None
    args = step.args if places is None else [step.args[place] for place in places]
    for index, formal in enumerate(op._schema.arguments):
        if index < len(args):
            yield formal, args[index]
        elif formal.name in step.kwargs:
            yield formal, step.kwargs[formal.name]
        elif formal.has_default_value():
            yield formal, formal.default_value
        else:
            raise _NotChainableError


def _free_dropped() -> None:
    with suppress(IndexError):  # none is left: another thread may have taken the last one
        while True:
            torch.ops.dlinfer_cpu.free_chain.default(_dropped.popleft())


class Chain:
    """A callable chain. The C++ library keeps the chain's code in memory as long as this object lives.

    The garbage collector may drop this object at any time, also while a thread traces a graph. Tracing records every
    call of torch, so the code cannot be freed by a call of torch at that moment. It is freed when the next chain is
    made.

    is_long: each run first announces a long computation to waiting threads (``utils.computing``)."""

    def __init__(self, code: list[int], is_long: bool = False) -> None:
        self._is_long = is_long
        _free_dropped()
        self.handle = torch.ops.dlinfer_cpu.make_chain.default(code)
        self._run = torch.ops.dlinfer_cpu.run_chain.default
        weakref.finalize(self, _dropped.append, self.handle).atexit = False

    def __call__(self, tensors: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        if self._is_long:
            computing.begins()
        return self._run(self.handle, tensors, sizes)
