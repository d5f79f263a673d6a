"""Does ``PytorchEngineConfig(device_type=...)`` work here? Tried in a child process, as in a user's script.

LMDeploy takes seconds to import and may be broken, so the process that asks never imports it.
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
"""What a script needs where torch's autoload is switched off."""

_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_TIMEOUT_SECONDS = 120

# The child makes the engine config first and looks at the adaptor after it, as importing the adaptor would
# itself put the patches in place.
_CHILD = """
import json, sys
device_type, import_line, found = sys.argv[1], sys.argv[2], {"error": ""}
exec(import_line)
try:
    import lmdeploy
    lmdeploy.PytorchEngineConfig(device_type=device_type)
except BaseException as error:
    found["error"] = f"{type(error).__name__}: {error}"
from dlinfer import _autoload
found["traceback"] = _autoload.failure() or ""
print(json.dumps(found))
"""


@dataclass(frozen=True)
class FrameworkState:
    """How a serving framework and its adaptor stand.

    version: null when it is not installed; then ``tested`` is null as well.
    tested: whether the version is inside the range this adaptor was tested with; ``note`` says so in words.
    state: ready: our device types work, with no line in the user's script.
        manual: torch's autoload is switched off; they work after the line that ``next_step`` gives.
        failed: they do not work; ``detail`` says why.
        absent: the framework is not installed.
    traceback: what failed in the autoload hook, or empty.
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
    """Look at the installed LMDeploy. Takes some seconds; never raises, never imports LMDeploy here."""
    try:
        version = metadata.version("lmdeploy")
    except metadata.PackageNotFoundError:
        step = "to serve models, `pip install --no-deps lmdeploy` (docs/start/install.md says what else it needs)"
        return FrameworkState("lmdeploy", None, None, "", "absent", "not installed", step, "")
    tested, note = describe(version)
    state, detail, step, traceback = _try_devices()
    return FrameworkState("lmdeploy", version, tested, note, state, detail, step, traceback)


def _try_devices() -> tuple[Literal["ready", "manual", "failed"], str, str, str]:
    """(state, detail, next step, traceback)"""
    autoload = os.environ.get(_SWITCH, "1") == "1"  # as torch reads it
    if autoload and not _hook_is_installed():
        detail = "torch does not know dlinfer's autoload hook: dlinfer is on the path, but not installed"
        return "failed", detail, "`pip install` dlinfer", ""
    ours = served()
    for device_type in ours:
        error, traceback = _try_device(device_type, "" if autoload else IMPORT_LINE)
        if error or traceback:
            detail = f"device_type={device_type!r}: {error or 'the patches failed'}"
            return "failed", detail, _advice(error, traceback), traceback
    devices = ", ".join(ours)
    if not autoload:
        detail = (
            f"{_SWITCH} is not 1, so torch does not load dlinfer; tried with an import: works ({devices})"
        )
        return "manual", detail, f"add `{IMPORT_LINE}` to the script before it uses lmdeploy", ""
    return "ready", f"device_type {devices} works in scripts that never import dlinfer", "", ""


def _advice(error: str, traceback: str) -> str:
    if traceback:
        return "install a tested version of lmdeploy"
    return "" if "Next step:" in error else "mend or reinstall lmdeploy"  # our own errors bring theirs


def _hook_is_installed() -> bool:
    hooks = metadata.entry_points(group="torch.backends")
    return any(hook.module == _autoload.__name__ for hook in hooks)


def _try_device(device_type: str, import_line: str) -> tuple[str, str]:
    """(what went wrong, traceback of the autoload hook), both empty when all is well."""
    command = [sys.executable, "-c", _CHILD, device_type, import_line]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"importing lmdeploy took more than {_TIMEOUT_SECONDS} s", ""
    try:
        found = json.loads(child.stdout.strip().splitlines()[-1])
        return found["error"], found["traceback"]
    except (IndexError, ValueError):  # it died without a word of ours
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return f"importing lmdeploy ended the process with status {child.returncode}: {last}", ""
