"""When ``import torch`` itself fails, since a package that torch loads with it does: doctor then looks without it.

The standard library alone, as torch cannot be imported.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

FAILED = "_DLINFER_AUTOLOAD_FAILED"
"""The variable that tells the process which looks what has failed."""
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def reason(error: BaseException) -> str | None:
    """The failure in torch's words, with its cause; None for an error of another kind."""
    if not str(error).startswith("Failed to load the backend extension"):
        return None
    said = str(error).partition(". You can")[0]
    cause = error.__cause__
    return f"{said}: {type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}" if cause else said


def problem() -> str:
    """For the report of the process that looks; empty where torch's autoload has not failed."""
    failed = os.environ.get(FAILED, "")
    if not failed:
        return ""
    return (
        f"import torch fails here, and everything that needs it ({failed}); this report was made with {SWITCH}=0. "
        "Next step: follow the advice for that package's vendor below, or uninstall the package."
    )


def run_without(argv: Sequence[str], failed: str) -> int:
    """Run a command in a process where torch loads no such package; return its exit status."""
    command = [sys.executable, "-m", "dlinfer", *argv]
    return subprocess.run(command, env=os.environ | {SWITCH: "0", FAILED: failed}, check=False).returncode
