"""Weights whose memory the system is asked to make of large pages."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from dlinfer.framework.lmdeploy_ext.device import huge_pages

SMAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> list[str]:
    """Those of the mapping with an address, as proc(5) names them."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system is told nothing of large pages")
def test_large_tensors_are_marked_to_their_ends_and_small_ones_are_not() -> None:
    if not SMAPS.exists():
        pytest.skip("this system does not tell how memory is mapped")
    large = torch.empty(64 << 20, dtype=torch.uint8)
    # In a mapping of its own: the heap keeps the mark of a large tensor that it once held.
    small = torch.frombuffer(mmap.mmap(-1, 1000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    huge_pages.wish_for([large[5:], small])
    assert "hg" in flags_at(large.data_ptr())
    assert "hg" in flags_at(large.data_ptr() + large.nbytes - 1)
    assert "hg" not in flags_at(small.data_ptr())


def test_nothing_is_asked_where_the_system_has_no_such_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    huge_pages.wish_for([torch.empty(64 << 20, dtype=torch.uint8)])


def test_numbers_stay() -> None:
    x = torch.arange(4 << 20)
    huge_pages.wish_for([x, x[3:], torch.empty(0)])
    assert torch.equal(x, torch.arange(4 << 20))
