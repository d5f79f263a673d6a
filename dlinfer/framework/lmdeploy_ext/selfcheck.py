"""Checks in a child process whether ``PytorchEngineConfig(device_type=...)`` works in this environment.

LMDeploy takes seconds to import and may be broken, so the calling process never imports LMDeploy.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from dlinfer import _autoload
from dlinfer.framework.lmdeploy_ext.device.devices import served
from dlinfer.framework.lmdeploy_ext.versions import describe

IMPORT_LINE = "import dlinfer.framework.lmdeploy_ext"
"""The line that a script needs if torch's autoload is switched off."""

_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_TIMEOUT_SECONDS = 120

# The child makes the engine config before it imports the adaptor, since that import would install the patches.
_CHILD = """
import json, sys

device_type, import_line = sys.argv[1:]
result = ""

exec(import_line)

try:
    import lmdeploy

    lmdeploy.PytorchEngineConfig(device_type=device_type)
except BaseException as error:
    result = f"{type(error).__name__}: {error}"

from dlinfer import _autoload

print(json.dumps([result, _autoload.failure() or ""]))
"""


@dataclass(frozen=True)
class FrameworkState:
    """The state of a serving framework and of dlinfer's adaptor for it.

    version: the framework's version; null if it is not installed, and then ``tested`` is null as well.
    tested: whether the version is in the range that the adaptor was tested with. note: the same answer in words.
    state: ready: our device types work without a change to the user's script.
        manual: torch's autoload is switched off; our device types work after the line that ``next_step`` gives.
        failed: our device types do not work; ``detail`` gives the reason.
        absent: the framework is not installed.
    traceback: the traceback of dlinfer's autoload hook if the hook failed, or empty.
    """

    name: str
    version: str | None
    tested: bool | None
    note: str
    state: Literal["ready", "manual", "failed", "absent"]
    detail: str
    next_step: str
    traceback: str


def check() -> FrameworkState:
    """Return the state of the installed LMDeploy. Takes some seconds, and never imports LMDeploy in this process."""
    try:
        version = metadata.version("lmdeploy")
    except metadata.PackageNotFoundError:
        step = "to serve models, run `pip install --no-deps lmdeploy` (docs/start/install.md says what else it needs)"
        return FrameworkState("lmdeploy", None, None, "", "absent", "not installed", step, "")
    return FrameworkState("lmdeploy", version, *describe(version), *_try_devices())


def _try_devices() -> tuple[Literal["ready", "manual", "failed"], str, str, str]:
    """Try each of our device types, and return (state, detail, next step, traceback) as in ``FrameworkState``."""
    autoload = os.environ.get(_SWITCH, "1") == "1"  # as torch reads it
    if autoload and not _hook_is_installed():
        detail = "torch cannot find dlinfer's autoload hook: dlinfer is on the path, but not installed"
        return "failed", detail, "`pip install` dlinfer", ""
    ours = served()
    for device_type in ours:
        error, traceback = _try_device(device_type, "" if autoload else IMPORT_LINE)
        if error or traceback:
            detail = f"device_type={device_type!r}: {error or 'the patches failed'}"
            step = "install a tested version of lmdeploy"
            if not traceback:  # only our own errors have a next step
                step = "" if "Next step:" in error else "repair or reinstall lmdeploy"
            return "failed", detail, step, traceback
    devices = ", ".join(ours)
    if not autoload:
        detail = f"{_SWITCH} is not 1, so torch does not load dlinfer by itself; with the import it works ({devices})"
        return "manual", detail, f"add `{IMPORT_LINE}` to the script before it uses lmdeploy", ""
    return "ready", f"device_type {devices} works in scripts that never import dlinfer", "", ""


def _hook_is_installed() -> bool:
    return any(hook.module == _autoload.__name__ for hook in metadata.entry_points(group="torch.backends"))


def _try_device(device_type: str, import_line: str) -> tuple[str, str]:
    """Try one device type in a child process, and return (error, traceback of dlinfer's autoload hook).

    Both are empty if the device type works. import_line: Python code that the child runs first.
    """
    command = [sys.executable, "-c", _CHILD, device_type, import_line]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"importing lmdeploy took more than {_TIMEOUT_SECONDS} s", ""
    try:
        error, traceback = json.loads(child.stdout.strip().splitlines()[-1])
        return error, traceback
    except (IndexError, ValueError):  # the child died before it printed a result
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return f"importing lmdeploy ended the process with status {child.returncode}: {last}", ""
