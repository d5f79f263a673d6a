"""Find and import the parts of Qualcomm's Cloud AI SDK that are installed on this machine."""

import importlib
import importlib.util
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from dlinfer.vendor.qaic.errors import QaicUnavailableError

EXEC = Path("/opt/qti-aic/exec")  # where the Apps SDK puts its tools
COMPILERS = ("qaic-compile", "qaic-exec")  # the tool's name in newer and in older SDKs
ADVICE = (
    "install Qualcomm's Cloud AI Platform and Apps SDKs and their wheel of the package qaic "
    "(/opt/qti-aic/dev/lib/x86_64/qaic-*.whl), or run the model's .onnx here with backend='onnxruntime'"
)


def compiler() -> Path | None:
    """Return the path of the SDK's compiler, from PATH or the SDK's folder; None if it is in neither."""
    for name in COMPILERS:
        path = shutil.which(name) or shutil.which(name, path=str(EXEC))
        if path:
            return Path(path)
    return None


def missing(*, compiling: bool) -> list[str]:
    """Return a sentence for each thing that this machine lacks to run a Session on a card. Imports nothing.

    compiling: whether the Session needs the compiler too.
    """
    lacking = []
    if platform.machine() not in ("x86_64", "AMD64"):
        lacking.append(f"the SDK runs on x86-64 only, and this machine is {platform.machine()}")
    if importlib.util.find_spec("qaic") is None:
        lacking.append("the Python package qaic is not installed")
    if compiling and compiler() is None:
        lacking.append(f"the compiler ({' or '.join(COMPILERS)}) is neither on PATH nor in {EXEC}")
    return lacking


def require(what: str, *, compiling: bool) -> None:
    """Raise QaicUnavailableError if this machine lacks anything to run a Session on a card.

    The message lists all of it.
    what: the action that needs a card, for the message.
    """
    lacking = missing(compiling=compiling)
    if lacking:
        raise QaicUnavailableError(what=what, missing="; ".join(lacking), advice=ADVICE)


def package() -> Any:
    """Import and return Qualcomm's package ``qaic``.

    Raises QaicUnavailableError if it cannot be imported, or if another package has this name.
    """
    try:
        module = importlib.import_module("qaic")
    except Exception as cause:  # its extension may fail in any way, e.g. under another Python
        version = ".".join(map(str, sys.version_info[:2]))
        raise _unusable(f"the package qaic cannot be imported under Python {version} ({cause})") from cause
    if not callable(getattr(module, "Session", None)):
        raise _unusable(
            f"the package qaic at {getattr(module, '__file__', None)} has no Session, so it is another "
            "package"
        )
    return module


def _unusable(reason: str) -> QaicUnavailableError:
    return QaicUnavailableError(what="use backend 'aic'", missing=reason, advice=ADVICE)
