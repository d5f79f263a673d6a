"""Load of other processes while something is measured: a round beside it is thrown away."""

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def busy() -> float:
    """Seconds that all CPUs together were busy since the machine started."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle = fields[3] + fields[4]  # idle and waiting for I/O
    return (sum(fields[:8]) - idle) / _TICKS


def spent(pid: int) -> float:
    """Seconds of CPU that a process and the children that it has waited for have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(fields[at]) for at in range(11, 15)) / _TICKS


class Watch:
    """Between its making and ``others``: how many CPUs were busy with anything but one process, on average."""

    def __init__(self, pid: int, seconds: float) -> None:
        """pid: of what is measured. seconds: the clock now, as ``time.perf_counter`` tells."""
        self.pid, self._begun = pid, seconds
        self._busy, self._spent = busy(), spent(pid)

    def others(self, seconds: float) -> float:
        """seconds: the clock now."""
        theirs = (busy() - self._busy) - (spent(self.pid) - self._spent)
        return max(0.0, theirs) / max(seconds - self._begun, 1e-3)
