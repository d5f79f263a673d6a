"""A script that runs one program for ``process.run``, and kills the program's process group when the caller ends.

``python -I -S supervisor.py CALLER COMMAND...`` leads the process group of the program and all its children. CALLER is
the caller's process id.

Two things tell the script that the caller ended. Standard input is a pipe that nobody writes to and that ends with the
caller. But a fork of the caller may hold the pipe open, so the kernel also sends SIGTERM when the caller ends.
"""

import ctypes
import os
import resource
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main(caller: int, command: list[str]) -> None:
    """Run the command. This process then ends as the command did: with the same exit status or by the same signal."""
    signal.signal(signal.SIGTERM, lambda *_: _end_all())
    _at_end_of(caller, signal.SIGTERM)
    supervisor, pipe = os.getpid(), os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    program = os.fork()  # fork before any thread starts
    if program == 0:
        _become(command, supervisor)
    threading.Thread(target=_watch, args=(pipe,), daemon=True).start()
    _end_as(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))


def _become(command: list[str], supervisor: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _at_end_of(supervisor, signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error.strerror}\n".encode())
        os._exit(127)


def _watch(pipe: int) -> None:
    os.read(pipe, 1)
    _end_all()


def _end_all() -> None:
    os.killpg(0, signal.SIGKILL)


def _end_as(status: int) -> None:
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no second core dump: the program wrote its own
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _at_end_of(parent: int, number: signal.Signals) -> None:
    """Let the kernel send this process the signal ``number`` when its parent ends for any reason: prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), *map(ctypes.c_ulong, (0, 0, 0))):
        error = ctypes.get_errno()
        raise OSError(error, f"PR_SET_PDEATHSIG: {os.strerror(error)}")
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
