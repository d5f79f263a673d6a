"""torch runs this module during ``import torch``: it adds one finder to ``sys.meta_path``, nothing more.

torch loads every entry point of the group ``torch.backends`` at the end of its own import, unless
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. An exception here would break everybody's ``import torch``. So this module imports
only the standard library, never raises, and keeps its failures for ``dlinfer doctor``. Where LMDeploy is never
imported, nothing else of dlinfer is loaded.
"""

import sys
import traceback
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FRAMEWORK = "lmdeploy"

_failure: str | None = None


def failure() -> str | None:
    """Return the traceback of an error that occurred in this process while patching the framework, or None."""
    return _failure


def install() -> None:
    """Add the finder to ``sys.meta_path`` once. Entry point of the group ``torch.backends``."""
    if not any(isinstance(finder, FrameworkFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, FrameworkFinder())


class FrameworkFinder(MetaPathFinder):
    """Notices imports of a framework's modules, and makes the adaptor patch the loaded modules.

    torch may be imported in the middle of ``import lmdeploy``, while some modules of lmdeploy are half executed. So the
    adaptor is called at each import, for all modules loaded so far, and once more after the imported module was
    executed.
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
    """Make the adaptor patch the loaded modules. Return False if it fails; imports then go on as without dlinfer."""
    global _failure
    if _failure is not None:
        return False
    try:
        from dlinfer.framework.lmdeploy_ext import install as adaptor

        adaptor.on_import(module)
    except Exception:  # noqa: BLE001 - whatever it is, LMDeploy goes on as without dlinfer; doctor shows it
        _failure = traceback.format_exc()
        return False
    return True
