"""Run ``dlinfer doctor`` even if a backend package that torch autoloads makes ``import torch`` fail.

This module uses only the standard library, because torch cannot be imported then.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

FAILED = "_DLINFER_AUTOLOAD_FAILED"
"""The environment variable that passes the text of the failure to the process of ``dlinfer doctor``."""
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def reason(error: BaseException) -> str | None:
    """Return torch's text about a failed autoload, with the cause; None if ``error`` is no failed autoload."""
    if not str(error).startswith("Failed to load the backend extension"):
        return None
    said = str(error).partition(". You can")[0]
    cause = error.__cause__
    return f"{said}: {type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}" if cause else said


def problem() -> str:
    """Return doctor's finding about torch's failed autoload; empty if autoload did not fail."""
    failed = os.environ.get(FAILED, "")
    if not failed:
        return ""
    return (
        f"import torch fails here ({failed}), so everything that needs torch fails. This report was made with "
        f"{SWITCH}=0. Next step: follow the advice for that package's vendor below, or uninstall the package."
    )


def run_without(argv: Sequence[str], failed: str) -> int:
    """Run a ``dlinfer`` command in a new process where torch autoloads no package. Return the exit status.

    argv: the command's arguments. failed: the text that ``reason`` returned, for doctor's report.
    """
    command = [sys.executable, "-m", "dlinfer", *argv]
    return subprocess.run(command, env=os.environ | {SWITCH: "0", FAILED: failed}, check=False).returncode
