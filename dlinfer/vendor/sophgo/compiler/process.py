"""A program of Sophgo's toolchain as a process: its own environment, a time limit, a log that outlives it."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dlinfer.toolchain import Environment, find
from dlinfer.vendor.sophgo.compiler.group import Group, Stop
from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN

STEP = "dlinfer step: "


class ProcessFailedError(Exception):
    """A program did not succeed; its text says how, and ``lines`` what it said last."""

    def __init__(self, how: str, lines: Sequence[str]) -> None:
        super().__init__(how)
        self.lines = tuple(lines)


def toolchain() -> Environment:
    """The toolchain's environment. Raises ToolchainMissingError where it is not installed."""
    return find(TOOLCHAIN)


def compiler_version() -> str:
    """Name and version of the compiler's package. Raises ToolchainMissingError."""
    found = sorted(path.name for path in toolchain().site_packages.glob("tpu_mlir-*.dist-info"))
    return found[-1].removesuffix(".dist-info") if found else "tpu_mlir of unknown version"


def driver_command(job: Path) -> list[str]:
    """The command that compiles what a job's file says."""
    driver = Path(__file__).with_name("driver.py")
    return [str(toolchain().python), "-s", str(driver), str(job)]


def model_tool() -> str:
    """The path of the tool that combines and describes bmodels."""
    return str(toolchain().site_packages / "tpu_mlir" / "bin" / "model_tool")


def run(
    command: Sequence[str],
    folder: Path,
    log: Path,
    timeout: float,
    progress: Callable[[str], None] | None = None,
    stop: Stop | None = None,
) -> None:
    """Run a program of the toolchain in ``folder``; what it prints goes to ``log``, its steps to ``progress``.

    The program and all that it started are ended after ``timeout`` seconds, when this call is interrupted, and by
    ``stop``. Raises ProcessFailedError and StoppedError.
    """
    late = threading.Event()
    last: list[str] = []
    group = Group(command, folder, _environment())

    def end() -> None:
        late.set()
        group.kill()

    timer = threading.Timer(timeout, end)
    try:
        timer.start()
        with (stop or Stop()).over(group), log.open("wb") as kept:
            for line in group.output:
                kept.write(line)
                text = line.decode(errors="replace").rstrip()
                if text.startswith(STEP):
                    if progress is not None:
                        progress(text.removeprefix(STEP))
                elif text:
                    last = [*last[-39:], text[:500]]
            status = group.wait()
    finally:
        timer.cancel()
        group.kill()
        group.wait()
    if late.is_set():
        raise ProcessFailedError(f"it was ended after {timeout:g} s", last)
    if status:
        how = f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"
        raise ProcessFailedError(how, last)


def _environment() -> dict[str, str]:
    """The caller's, without what leads Python or the loader to the caller's packages."""
    taken = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_"))}
    package = toolchain().site_packages / "tpu_mlir"
    libraries = [package / "lib", package / "lib" / "capi", package / "lib" / "third_party"]
    taken["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    taken["PATH"] = os.pathsep.join([str(toolchain().scripts), taken.get("PATH", os.defpath)])
    taken["PYTHONDONTWRITEBYTECODE"] = "1"
    taken.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    return taken
