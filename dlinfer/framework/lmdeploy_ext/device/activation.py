"""Activates one of our devices for LMDeploy in this process, and tells other modules which device is active.

Activation checks the patches on LMDeploy and installs the device view, a replacement of ``torch`` in LMDeploy's modules
that translates "cuda" to the active device. The module ``install`` provides the patches.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from dlinfer import settings
from dlinfer.errors import DeviceConflictError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.device import devices, view
from dlinfer.framework.lmdeploy_ext.versions import FAULTY, describe
from dlinfer.framework.patching import Patch, PatchSet, replaces
from dlinfer.vendor import Device, discovery
from dlinfer.vendor.streams import HostStreams

logger = logging.getLogger("dlinfer")

_records: Callable[[], list[Patch]] | None = None
_patches: PatchSet | None = None
_patches_lock = threading.Lock()
_active: str | None = None
_torch_device: str | None = None
_changed: Callable[[], Iterable[tuple[Patch, str]]] = tuple
_told: set[str] = set()
_uses: set[str] = set()
"""The model types and features that this process's engine uses. Their essential patches must match LMDeploy."""


def provide(records: Callable[[], list[Patch]], changed: Callable[[], Iterable[tuple[Patch, str]]]) -> None:
    """Store two functions, which are called later, when their results are needed.

    records: returns all patches.
    changed: returns (patch, reviewed release) for each patch whose LMDeploy function has another body than in the
    reviewed release.
    """
    global _records, _changed
    _records, _changed = records, changed


def patches() -> PatchSet:
    global _patches
    if _patches is None:
        assert _records is not None, "dlinfer.framework.lmdeploy_ext provides them when it is imported"
        new = PatchSet("lmdeploy", _records())  # outside the lock, since _records() imports modules
        with _patches_lock:  # only one set: a second one would take replacements for originals
            _patches = _patches or new
    return _patches


def active() -> str | None:
    """Return our active device_type; None if LMDeploy runs on none of our devices in this process."""
    return _active


def is_on() -> bool:
    """Return whether LMDeploy runs on one of our devices in this process. Most patches have an effect only then."""
    return _active is not None


def corrects(target: str, *, why: str, **record: Any) -> Callable[[Callable[..., Any]], Patch]:
    """Return a decorator that makes a function a patch for tested LMDeploy releases and our devices only.

    target: the LMDeploy function to replace. why: the fault in that function. record: other fields of the Patch, such
    as ``essential``, ``for_models`` and ``upstream``.
    """
    return replaces(target, why=why, when=is_on, versions=FAULTY, **record)


def refuse(feature: str, advice: str, device_type: str | None = None) -> UnsupportedFeatureError:
    """Return an UnsupportedFeatureError.

    feature: the thing that is not supported. advice: the user's next step. device_type: the device to name in the
    error; None for the active device.
    """
    named = device_type or _active
    where = f"device_type {named!r}" if named else "a device of dlinfer's"
    return UnsupportedFeatureError(feature=feature, where=where, advice=advice)


def serves(device_type: str) -> bool:
    return device_type == _active or devices.serves(device_type)


def torch_device() -> str:
    """Return torch's name of the active device. Call this only while one of our devices is active."""
    assert _torch_device is not None, "LMDeploy runs on one of its own devices"
    return _torch_device


def device() -> Device:
    """Return the vendor's description of the active device. Call this only while one of our devices is active."""
    return discovery.device(torch_device())


def is_synchronous() -> bool:
    """Return whether one of our devices is active and computes ops synchronously, as the host does."""
    return active() is not None and isinstance(device().streams, HostStreams)


def activate(device_type: str) -> None:
    """Make LMDeploy run on one of our devices in this process. A second call for the same device only checks patches.

    An optional patch that does not match the installed LMDeploy is logged. Raises PatchError if an essential patch does
    not match it, and DeviceConflictError if another of our devices is active.
    """
    global _active, _torch_device
    if _active == device_type:
        require()  # for modules that were imported since
        return
    if _active is not None:
        raise DeviceConflictError(framework="LMDeploy", active=_active, given=device_type)
    show_notices()
    # Only the parent process logs notices, not each process of an engine.
    is_parent = multiprocessing.parent_process() is None
    if is_parent:
        _tell_of_unknown_settings()
    inside, line = describe(patches().version())
    if not inside:
        logger.warning("%s", line)
    patches().apply_loaded()
    require()
    if is_parent:
        _tell_of_changed_bodies()

    name = devices.torch_device(device_type)
    view.install(name, discovery.device(name))
    _active, _torch_device = device_type, name
    tell_of_misfits()


def check_device(device_type: str) -> None:
    """Raise an error if an engine on ``device_type`` cannot be built. If none of our devices is active, do nothing.

    Raises DeviceConflictError if ``device_type`` is not the active device, because the device view translates "cuda" to
    the active device in the whole process. Raises PatchError if an essential patch does not match the installed
    LMDeploy.
    """
    if _active is None:
        return
    if device_type != _active:
        raise DeviceConflictError(framework="LMDeploy", active=_active, given=device_type)
    _uses.clear()  # drop the uses of the previous engine
    require()


def require(*uses: str) -> None:
    """Record the model types and features that the engine uses, and check the patches for everything recorded so far.

    uses: model types such as ``minicpm3``, and the patches' ``for_feature`` such as ``tensor parallelism``.

    Raises PatchError if an essential patch does not match the installed LMDeploy. Each call also checks the patches on
    LMDeploy modules that were imported since the last call.
    """
    _uses.update(uses)
    patches().require_essential(_uses)


def tell_of_misfits() -> None:
    """Log each patch that does not match the installed LMDeploy, once.

    Of the essential patches that all models need, only the first is logged. If no device of ours is active, optional
    patches are not logged.
    """
    for patch, error in patches().misfits():
        if patch.target in _told or (_active is None and not patch.essential):
            continue
        _told.add(patch.target)
        if not patch.essential:
            logger.warning("device_type %s runs without an optional patch: %s", _active, error)
        elif patch.uses or "" not in _told:
            if not patch.uses:
                _told.add("")
            _, line = describe(patches().version())
            only = f" for {', '.join(patch.uses)}" if patch.uses else ""
            where = ", ".join(devices.served())
            logger.warning("%s; device_type %s does not work%s: %s", line, where, only, error)


def _tell_of_changed_bodies() -> None:
    """Log a warning for each patched function that has the reviewed parameters, but not the reviewed body."""
    for patch, reviewed in _changed():
        logger.warning(
            "lmdeploy %s: the body of %s differs from the one reviewed in %s. A patch replaces it, because the "
            "reviewed one "
            "%s. Next step: run `dlinfer contract`, which shows what changed, or install lmdeploy %s",
            patches().version(),
            patch.target,
            reviewed,
            patch.why,
            reviewed,
        )


def show_notices() -> None:
    """Send dlinfer's log to stderr, unless the application has configured logging."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("dlinfer: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _tell_of_unknown_settings() -> None:
    """Log a warning for each environment variable that looks like a dlinfer setting, but is none."""
    for name in settings.unknown(os.environ):
        near = settings.nearest(name)
        hint = f" (did you mean {near}?)" if near else ""
        logger.warning("%s is not a setting of dlinfer%s, so it has no effect.", name, hint)
