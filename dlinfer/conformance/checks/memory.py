"""Checks of memory: a call accesses no memory except its arguments and results, and keeps no memory afterwards."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.conformance.case import Case, Failed, Skipped, bits, mapped, poison
from dlinfer.ops.core import oracle

GAP = 3
"""The number of elements between two rows of a view, and around the view."""

ROUNDS, CALLS = 4, 60
LEAKED_BYTES = 48 << 10
"""The process may grow by this many bytes in a round of calls, because allocators keep whole pages."""


def aliasing(case: Case) -> None:
    """Check that results are new tensors: none shares memory with an argument or with another result."""
    args = case.fresh()
    returned = case.call(args)
    produced = oracle.results(case.op, args, returned)
    fresh = [tensor for tensor in produced[: len(produced) - len(case.op.mutates)] if tensor.numel()]
    taken = {tensor.untyped_storage().data_ptr(): name for name, tensor in case.named(args) if tensor.numel()}
    for number, tensor in enumerate(fresh):
        place = tensor.untyped_storage().data_ptr()
        if place in taken:
            raise Failed(f"result {number} shares memory with {taken[place]}")
        taken[place] = f"result {number}"


def mutation(case: Case) -> None:
    """Check that a call writes only the arguments that the schema declares as mutated."""
    if case.aliased:
        raise Skipped("in this sample, an input shares memory with an output")
    args = case.fresh()
    before = [(name, tensor, bits(tensor)) for name, tensor in case.named(args)]
    case.call(args)
    for name, tensor, was in before:
        if name not in case.op.mutates and not torch.equal(bits(tensor), was):
            raise Failed(f"the call writes to {name}, but the schema does not declare it as mutated")


def views(case: Case) -> None:
    """Check a call with arguments that are views of larger tensors. The call must not use elements around a view."""
    if case.aliased:
        raise Skipped("in this sample, arguments share memory")
    around: list[tuple[Tensor, Tensor]] = []

    def placed(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.numel() == 0:
            return tensor
        whole, view = _inside(tensor)
        around.append((whole, view))
        return view

    args = mapped(placed, case.fresh())
    outside = [(whole, _outside(whole, view), bits(whole)) for whole, view in around]
    returned = case.call(args)
    case.compare(args, returned, case.expected())
    for whole, mask, was in outside:
        if not torch.equal(bits(whole)[mask], was[mask]):
            raise Failed("the call writes outside an argument that is a view")


def _inside(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (whole, view): a tensor full of ``poison`` values, and a view inside it with the elements of ``tensor``.

    The rows of the view are contiguous.
    """
    *rows, size = tensor.shape
    if rows:
        rows[0] += 2
    shape = (*rows, size + 2 * GAP)
    whole = torch.full(shape, poison(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
    view = whole[..., GAP : GAP + size]
    if rows:
        view = view[1:-1]
    view.copy_(tensor)
    return whole, view


def _outside(whole: Tensor, view: Tensor) -> Tensor:
    """Return a bool mask on the host. It is True for the elements of ``whole`` that are outside ``view``."""
    mask = torch.ones(whole.shape, dtype=torch.bool)
    mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return mask


def leaks(case: Case) -> None:
    """Check that repeated calls leak neither objects of Python, nor memory of the process, nor memory of the device."""
    args = case.fresh()
    for _ in range(CALLS):  # warm up: one-time allocations happen now
        case.call(args)
    names = ("Python memory blocks", "bytes of process memory", "bytes of device memory")
    allowed = (CALLS // 2, LEAKED_BYTES, CALLS - 1)
    gc.collect()
    gc.freeze()  # each count then skips the objects that torch holds
    try:
        grown = least_growth(lambda: _held(case), lambda: _repeat(case, args))
    finally:
        gc.unfreeze()
    for name, most, growth in zip(names, allowed, grown, strict=True):
        if growth > most:
            raise Failed(f"memory leaks: {CALLS} calls keep {growth} {name}")


def _repeat(case: Case, args: list[Any]) -> None:
    for _ in range(CALLS):
        case.call(args)


def _held(case: Case) -> tuple[int, int, int]:
    gc.collect()
    device = 0
    if case.subject.vendor.load_device is not None and not case.subject.on_host:
        from dlinfer.vendor import discovery

        device = -discovery.device_of(case.subject.vendor).memory().available
    return sys.getallocatedblocks(), _resident(), device


def _resident() -> int:
    """Return the size of the process's anonymous memory in bytes, swapped or not; 0 if the system reports none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    lines = (line.split() for line in status.read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:", "VmSwap:")) * 1024


def least_growth(held: Callable[[], tuple[int, ...]], work: Callable[[], None]) -> list[int]:
    """Return by how much one round of ``work`` increases each number that ``held`` returns.

    Several rounds run, and each number's least growth counts, because other code can also allocate memory in a round.
    """
    grown: list[list[int]] = []
    before = held()
    for _ in range(ROUNDS):
        work()
        after = held()
        grown.append([now - then for now, then in zip(after, before, strict=True)])
        before = after
    return [min(each) for each in zip(*grown, strict=True)]
