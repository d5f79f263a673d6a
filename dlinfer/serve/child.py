"""``python -m dlinfer.serve.child PLACEMENT COMMAND...`` binds this process to a placement, then becomes the command.

The placement ``-`` binds nothing. The command gets SIGTERM when its parent dies. This module imports only the standard
library.
"""

import ctypes
import os
import platform
import signal
import sys

from dlinfer.serve.placement import Placement

_PR_SET_PDEATHSIG = 1
_MPOL_PREFERRED = 1
# Machine -> number of the system call set_mempolicy.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def command(placement: Placement | None, *words: str) -> list[str]:
    """Return the command line that runs ``words``, a command, through this module. placement: None binds nothing."""
    where = "-" if placement is None else placement.encode()
    return [sys.executable, "-m", "dlinfer.serve.child", where, *words]


def bind(placement: Placement) -> None:
    """Bind this process, and all processes that it starts, to the placement's CPUs and memory."""
    os.sched_setaffinity(0, placement.cpus)
    os.environ.setdefault("OMP_NUM_THREADS", str(placement.threads))
    number = _SET_MEMPOLICY.get(platform.machine())
    if placement.node is not None and number is not None:
        mask = (ctypes.c_ulong * 16)()
        mask[placement.node // 64] = 1 << placement.node % 64
        # If the node is full, memory comes from another node. A container may forbid the call. Memory then comes from
        # the node of the CPU that touches it first.
        ctypes.CDLL(None).syscall(number, _MPOL_PREFERRED, mask, ctypes.c_ulong(8 * ctypes.sizeof(mask)))


def main() -> None:
    """Bind this process, and replace its program by the command."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before prctl was called
        sys.exit(1)
    if sys.argv[1] != "-":
        bind(Placement.decode(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
