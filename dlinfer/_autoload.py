"""During ``import torch``, torch imports this module and calls ``install``, which adds one finder to ``sys.meta_path``.

torch loads every entry point of the group ``torch.backends`` at the end of its own import, unless
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. An exception here would break everybody's ``import torch``. So this module imports
only the standard library and never raises. If a patch fails, it writes a line to stderr and keeps the traceback for
``dlinfer doctor``. In a process that never imports LMDeploy, this module loads nothing else of dlinfer.
"""

import contextlib
import sys
import traceback
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FRAMEWORK = "lmdeploy"

_failure: str | None = None


def failure() -> str | None:
    """Return the traceback of the error that patching LMDeploy raised in this process, or None."""
    return _failure


def install() -> None:
    """Add the finder to ``sys.meta_path`` once.

    torch calls this function as an entry point of the group ``torch.backends``.
    """
    if not any(isinstance(finder, FrameworkFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, FrameworkFinder())


class FrameworkFinder(MetaPathFinder):
    """Calls dlinfer's LMDeploy adaptor at every import of an LMDeploy module, so that the adaptor can patch LMDeploy.

    The adaptor is called before the search for the module and again after the module's execution. Each call patches all
    LMDeploy modules that are loaded by then. Modules can be loaded before this finder exists: ``import lmdeploy``
    imports torch, which installs the finder, while some LMDeploy modules are only half executed.
    """

    def find_spec(self, fullname: str, path=None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != FRAMEWORK or not _notify(None):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _call_after_execution(spec.loader)
        return spec


def _call_after_execution(loader) -> None:
    execute = loader.exec_module

    def execute_and_notify(module: ModuleType) -> None:
        execute(module)
        _notify(module)

    loader.exec_module = execute_and_notify


def _notify(module: ModuleType | None) -> bool:
    """Make the adaptor patch the loaded modules. Return False if the adaptor failed, now or earlier in this process.

    After a failure, the adaptor is not called again, and LMDeploy runs as without dlinfer.
    """
    global _failure
    if _failure is not None:
        return False
    try:
        from dlinfer.framework.lmdeploy_ext import install as adaptor

        adaptor.on_import(module)
    except Exception as error:  # noqa: BLE001 - whatever it is, LMDeploy goes on as without dlinfer
        _failure = traceback.format_exc()
        _print(f"LMDeploy runs without dlinfer, because a patch failed: {type(error).__name__}: {error}")
        return False
    return True


def _print(text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed, or None
        sys.stderr.write(f"dlinfer: {text}. `dlinfer doctor` shows the traceback.\n")
