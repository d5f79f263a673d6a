"""What memory a process holds: what it has written itself, which no pressure on the machine's memory changes."""

from collections.abc import Callable
from pathlib import Path

ROUNDS = 4


def resident(pid: int | None = None) -> int:
    """Bytes of anonymous and shared memory, also where they were swapped out; not pages of files, which come and go."""
    lines = Path(f"/proc/{'self' if pid is None else pid}/status").read_text().splitlines()
    found = {
        name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()
    }
    return sum(int(found.get(name, "0")) for name in ("RssAnon", "RssShmem", "VmSwap")) * 1024


def mapped_files(pid: int) -> int:
    """How many pieces of files a process has mapped."""
    return sum(" /" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def least_growth(held: Callable[[], tuple[int, ...]], work: Callable[[], None]) -> list[int]:
    """How much each of the numbers that ``held`` gives grows over ``work``, in the round in which it grows least.

    What leaks leaks in each round; what an allocator takes at a time, and keeps, it takes in one.
    """
    grown = []
    before = held()
    for _ in range(ROUNDS):
        work()
        after = held()
        grown.append([now - then for now, then in zip(after, before, strict=True)])
        before = after
    return [min(each) for each in zip(*grown, strict=True)]
