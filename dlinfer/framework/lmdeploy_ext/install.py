"""Puts the patches in place as LMDeploy's modules appear, and the device view once a device of ours is chosen.

Patches are applied whenever LMDeploy is imported, since modules copy each other's names while they load; each
one leaves LMDeploy's own devices to the original. The device view is only installed by ``activate``.
"""

import logging
import threading
from importlib import metadata
from types import ModuleType

from dlinfer.errors import DeviceConflictError, PatchError
from dlinfer.framework.lmdeploy_ext.devices import SERVED
from dlinfer.framework.lmdeploy_ext.versions import describe
from dlinfer.framework.patching import Patch, PatchSet

logger = logging.getLogger("dlinfer")

_patches: PatchSet | None = None
_patches_lock = threading.Lock()
_active: str | None = None
_told: set[str] = set()


def patches() -> PatchSet:
    """The patch set of this process."""
    global _patches
    if _patches is None:
        made = PatchSet("lmdeploy", _records())  # without the lock, as this imports
        with _patches_lock:  # a second set would take the replacements of the first for originals
            _patches = _patches or made
    return _patches


def _records() -> list[Patch]:
    from dlinfer.framework.lmdeploy_ext import (
        cli,
        device_patches,
        engine_config,
        generation,
        generation_checks,
        http_errors,
        kv_memory,
        model_checks,
        model_config,
        refusals,
        request_checks,
        rope_lengths,
        rope_parameters,
        scoring,
        serving,
        weight_checks,
    )

    modules = (
        engine_config,
        refusals,
        cli,
        device_patches,
        kv_memory,
        generation,
        generation_checks,
        http_errors,
        model_checks,
        model_config,
        request_checks,
        rope_lengths,
        rope_parameters,
        scoring,
        serving,
        weight_checks,
    )
    return [patch for module in modules for patch in module.PATCHES]


def on_import(module: ModuleType | None) -> None:
    """Called at each import of an LMDeploy module, with the module once it has been executed."""
    patches().apply_loaded()
    _tell_of_misfits()
    if _active is not None and module is not None:
        from dlinfer.framework.lmdeploy_ext import device_view

        device_view.cover(module)


def active() -> str | None:
    """The device_type of ours that LMDeploy runs on in this process, or None."""
    return _active


def serves(device_type: str) -> bool:
    """Whether a device_type is one of this adaptor's."""
    return device_type in SERVED


def activate(device_type: str) -> None:
    """Make LMDeploy run on one of our devices in this process. Idempotent.

    Raises PatchError when the installed LMDeploy is not what an essential patch was written for, and
    DeviceConflictError when another of our devices is in use. What it does without is logged.
    """
    global _active
    if _active == device_type:
        patches().require_essential()  # of modules that were imported since
        return
    if _active is not None:
        raise DeviceConflictError(framework="LMDeploy", active=_active, given=device_type)
    _show_notices()
    inside, line = describe(metadata.version("lmdeploy"))
    if not inside:
        logger.warning("%s", line)
    patches().apply_loaded()
    patches().require_essential()

    from dlinfer.framework.lmdeploy_ext import device_view
    from dlinfer.vendor import activate_default

    activate_default(SERVED[device_type].torch_device)
    device_view.install(SERVED[device_type].torch_device)
    _active = device_type
    _tell_of_misfits()


def deactivate() -> None:
    """Undo everything: LMDeploy is as it was installed. No engine may be running."""
    global _active
    from dlinfer.framework.lmdeploy_ext import device_view

    device_view.uninstall()
    patches().revert()
    _active = None


def check_device(device_type: str) -> None:
    """Called before an engine is built. Raises DeviceConflictError for a device that the view would misplace, and
    PatchError where a module that was imported since is not what an essential patch was written for."""
    if _active is None:
        return
    if device_type != _active:
        raise DeviceConflictError(framework="LMDeploy", active=_active, given=device_type)
    patches().require_essential()


def _tell_of_misfits() -> None:
    """Log what does not fit this LMDeploy, each patch once: essential ones to everybody, others to who does without."""
    for error in patches().done_without() if _active is not None else ():
        if error.fields["target"] not in _told:
            _told.add(error.fields["target"])
            logger.warning("device_type %s does without a patch: %s", _active, error)
    try:
        patches().require_essential()
    except PatchError as error:
        if error.fields["target"] not in _told:
            _told.add(error.fields["target"])
            _, line = describe(metadata.version("lmdeploy"))
            logger.warning("%s; device_type %s does not work: %s", line, ", ".join(SERVED), error)


def _show_notices() -> None:
    """Notices go to stderr unless the application has configured logging for us."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("dlinfer: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
