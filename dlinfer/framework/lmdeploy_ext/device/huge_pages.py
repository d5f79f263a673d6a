"""Backs weights with huge pages, so that decoding steps read the weights faster.

A decoding step reads every weight once, in order. With small pages this is slow: hardware prefetch stops at the end of
a page, and each page needs an address translation. On a Zen 4, pages of 4 KiB made a step of a model of Qwen2.5-0.5B's
shape 1.06 to 1.14 times as long, in bfloat16 and in float32. Linux uses huge pages if we call madvise(2) with
MADV_HUGEPAGE before the first write.

Weights that are packed while they load lie in memory that was written before, or between other weights. After loading,
``gather`` moves them into huge pages.
"""

import contextlib
import ctypes
import mmap
from collections import Counter
from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces

_SMALLEST = 128 << 10  # bytes: malloc serves smaller requests from memory that it already has
_HUGE = 2 << 20  # bytes: the size of a huge page
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1, which Python does not name


def wish_for(tensors: Iterable[Tensor]) -> None:
    """Ask the system to back tensors in host memory with huge pages. Without MADV_HUGEPAGE this does nothing.

    Call this before the tensors are written, because the system converts written pages to huge ones late or never. A
    huge page may also hold a part of a neighbouring tensor.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    for begin, end in _extents(tensors):
        if end - begin >= _SMALLEST:
            _advise(begin // mmap.PAGESIZE * mmap.PAGESIZE, end, mmap.MADV_HUGEPAGE)


def gather(tensors: Iterable[Tensor]) -> None:
    """Move tensors in host memory into huge pages. Pages stay small where tensors fill less than half of a huge page.

    The system copies the pages at once (Linux 6.1) or in the background.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    filled = Counter[int]()  # bytes of tensors in each huge page, by the page's number
    for begin, end in _extents(tensors):
        for page in range(begin // _HUGE, -(-end // _HUGE)):
            filled[page] += min(end, (page + 1) * _HUGE) - max(begin, page * _HUGE)
    pages = sorted(page for page, count in filled.items() if count >= _HUGE // 2)
    for _, run in groupby(enumerate(pages), lambda item: item[1] - item[0]):
        first, *others = [page for _, page in run]
        begin, end = first * _HUGE, (first + len(others) + 1) * _HUGE
        _advise(begin, end, mmap.MADV_HUGEPAGE)
        _advise(begin, end, _COLLAPSE)


def _extents(tensors: Iterable[Tensor]) -> set[tuple[int, int]]:
    """Return the first address of each storage and the address after its last byte."""
    stores = [tensor.untyped_storage() for tensor in tensors]
    return {(store.data_ptr(), store.data_ptr() + store.nbytes()) for store in stores}


def _advise(begin: int, end: int, advice: int) -> None:
    """Call madvise(2). A system that refuses leaves the memory as it is."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise(begin, end - begin, advice)


@replaces(
    "lmdeploy.pytorch.weight_loader.model_weight_loader:process_weights_after_loading",
    why="leaves freed memory with the C library, and weights that were packed while they loaded in small pages",
    when=activation.is_on,
    essential=False,
)
def _process_weights_after_loading(original: Original, model: torch.nn.Module) -> None:
    original(model)
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    if activation.device().memory().shared:
        gather(parameter for parameter in model.parameters() if not parameter.is_meta)
