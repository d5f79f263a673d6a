"""Run programs of Sophgo's toolchain: their commands, their environment variables, and the steps that they report."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dlinfer.toolchain import Environment, find, process
from dlinfer.toolchain.process import ProcessFailedError, Stop
from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN

_STEP = "dlinfer step: "
DRIVER = Path(__file__).with_name("driver.py")
"""The script that runs the compiler in the toolchain's Python."""


def toolchain() -> Environment:
    """Return the toolchain's Python environment. Raises ToolchainMissingError if it is not installed."""
    return find(TOOLCHAIN)


def compiler_version() -> str:
    """Return the name and version of the compiler's package. Raises ToolchainMissingError."""
    versions = sorted(path.name for path in toolchain().site_packages.glob("tpu_mlir-*.dist-info"))
    return versions[-1].removesuffix(".dist-info") if versions else "tpu_mlir of unknown version"


def driver_command(job: Path) -> list[str]:
    return [str(toolchain().python), "-s", str(DRIVER), str(job)]


def model_tool() -> str:
    """Return the path of the tool that combines and describes bmodels."""
    return str(toolchain().site_packages / "tpu_mlir" / "bin" / "model_tool")


def run(
    command: Sequence[str],
    folder: Path,
    log: Path,
    timeout: float,
    progress: Callable[[str], None] | None = None,
    stop: Stop | None = None,
) -> None:
    """Run a program of the toolchain in ``folder``, with its output in the file ``log``.

    progress: called with the name of each step that the program reports.
    Raises StoppedError after ``stop``.
    Raises ProcessFailedError with the output, but without the lines that report steps."""

    def on_line(line: str) -> None:
        if progress is not None and line.startswith(_STEP):
            progress(line.removeprefix(_STEP))

    try:
        process.run(
            command,
            seconds=timeout,
            folder=folder,
            environment=_environment(),
            log=log,
            on_line=on_line,
            stop=stop,
        )
    except ProcessFailedError as failed:
        lines = [line for line in failed.lines if not line.startswith(_STEP)]
        raise ProcessFailedError(str(failed), lines) from failed


def _environment() -> dict[str, str]:
    libraries = toolchain().site_packages / "tpu_mlir" / "lib"
    folders = [libraries, libraries / "capi", libraries / "third_party"]
    return {"OMP_NUM_THREADS": str(os.cpu_count() or 1)} | process.own_environment(
        LD_LIBRARY_PATH=os.pathsep.join(map(str, folders)),
        PATH=os.pathsep.join([str(toolchain().scripts), os.environ.get("PATH", os.defpath)]),
        PYTHONDONTWRITEBYTECODE="1",
    )
