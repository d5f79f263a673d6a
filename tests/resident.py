"""What memory a process holds: what it has written itself, which no pressure on the machine's memory changes."""

from pathlib import Path

from dlinfer.conformance.checks.memory import ROUNDS, least_growth

__all__ = ["ROUNDS", "least_growth", "mapped_files", "resident"]


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
