"""Weights in huge pages."""

import mmap
import platform
import re
from pathlib import Path

import pytest
import torch

from dlinfer.framework.lmdeploy_ext.device import huge_pages

SMAPS = Path("/proc/self/smaps")


def told(address: int, field: str) -> list[str]:
    """The words of a field of the mapping with an address, as proc(5) names it."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith(f"{field}:"):
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
    assert "hg" in told(large.data_ptr(), "VmFlags")
    assert "hg" in told(large.data_ptr() + large.nbytes - 1, "VmFlags")
    assert "hg" not in told(small.data_ptr(), "VmFlags")


def test_nothing_is_asked_where_the_system_has_no_such_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    huge_pages.wish_for([torch.empty(64 << 20, dtype=torch.uint8)])


def test_numbers_stay() -> None:
    x = torch.arange(4 << 20)
    huge_pages.wish_for([x, x[3:], torch.empty(0)])
    assert torch.equal(x, torch.arange(4 << 20))


def test_written_tensors_are_gathered_and_keep_their_numbers() -> None:
    whole = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(whole, dtype=torch.int64)
    weights = memory[: 1 << 20].split(1 << 18)
    memory[:] = torch.arange(memory.numel())
    # A quarter of the mapping: storages of views are whole, so each weight is a storage of its own.
    apart = [
        torch.frombuffer(whole, dtype=torch.int64, count=1 << 18, offset=part << 21) for part in range(4)
    ]
    huge_pages.gather([*apart, torch.empty(0)])
    assert torch.equal(torch.cat(apart), torch.arange(1 << 20))
    assert all(torch.equal(one, weight) for one, weight in zip(apart, weights, strict=True))
    if not SMAPS.exists() or "never" in huge_pages_setting() or kernel() < (6, 1):
        pytest.skip("this system does not collapse pages")
    huge = int(told(memory.data_ptr(), "AnonHugePages")[0]) << 10
    assert 6 << 20 <= huge <= 8 << 20, "the address may be no multiple of 2 MiB"


def test_a_huge_page_with_little_of_a_tensor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *call: asked.append(call))
    extents = {
        (10 << 20, (12 << 20) + 1000),
        (14 << 20, 15 << 20),
        (21 << 20, 22 << 20),
        (30 << 20, (30 << 20) + 9),
    }
    monkeypatch.setattr(huge_pages, "_extents", lambda tensors: extents)
    huge_pages.gather([])
    ranges = [(begin >> 20, end >> 20) for begin, end, advice in asked if advice == mmap.MADV_HUGEPAGE]
    assert ranges == [(10, 12), (14, 16), (20, 22)]
    assert len(asked) == 6, "each range is marked and collapsed"


def huge_pages_setting() -> str:
    """The chosen one of always, madvise and never."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return re.findall(r"\[(\w+)\]", path.read_text())[0] if path.exists() else "never"


def kernel() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
