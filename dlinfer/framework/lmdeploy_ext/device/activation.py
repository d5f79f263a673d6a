"""Which device of ours LMDeploy runs on in this process, and switching it on.

Choosing one checks the patches and installs the device view; everything else asks here who is active. The patches
themselves are handed in by ``install``, which knows all of them.
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
"""Model types and features that the engine of this process uses."""


def provide(records: Callable[[], list[Patch]], changed: Callable[[], Iterable[tuple[Patch, str]]]) -> None:
    """Hand in two functions, which are called when they are needed.

    records: lists the patches. changed: lists the patches whose original has another body than the reviewed one, with
    the release that was reviewed.
    """
    global _records, _changed
    _records, _changed = records, changed


def patches() -> PatchSet:
    """The patch set of this process."""
    global _patches
    if _patches is None:
        assert _records is not None, "dlinfer.framework.lmdeploy_ext provides them when it is imported"
        new = PatchSet("lmdeploy", _records())  # without the lock, as this imports
        with _patches_lock:  # a second set would take the replacements of the first for originals
            _patches = _patches or new
    return _patches


def active() -> str | None:
    """The device_type of ours that LMDeploy runs on in this process, or None."""
    return _active


def is_on() -> bool:
    """Whether LMDeploy runs on a device of ours in this process: the condition of most patches."""
    return _active is not None


def corrects(target: str, *, why: str, **record: Any) -> Callable[[Callable[..., Any]], Patch]:
    """``replaces`` for a fault of the tested releases, which is corrected on a device of ours. record: as there."""
    return replaces(target, why=why, when=is_on, versions=FAULTY, **record)


def refuse(feature: str, advice: str, device_type: str | None = None) -> UnsupportedFeatureError:
    """The error for a feature that is not served. device_type: None for the device in use."""
    named = device_type or _active
    where = f"device_type {named!r}" if named else "a device of dlinfer's"
    return UnsupportedFeatureError(feature=feature, where=where, advice=advice)


def serves(device_type: str) -> bool:
    """Whether a device_type is one of this adaptor's."""
    return device_type == _active or devices.serves(device_type)


def torch_device() -> str:
    """torch's name of the device that LMDeploy runs on, which is one of ours."""
    assert _torch_device is not None, "LMDeploy runs on one of its own devices"
    return _torch_device


def device() -> Device:
    """The active vendor's description of the device that LMDeploy runs on, which is one of ours."""
    return discovery.device(torch_device())


def is_synchronous() -> bool:
    """Whether calls on the active device return when their work is done, as on the host."""
    return active() is not None and isinstance(device().streams, HostStreams)


def activate(device_type: str) -> None:
    """Make LMDeploy run on one of our devices in this process, and log the patches that do not fit. Idempotent.

    Raises PatchError when the installed LMDeploy is not what an essential patch was written for, and
    DeviceConflictError when another of our devices is in use.
    """
    global _active, _torch_device
    if _active == device_type:
        require()  # modules were imported since
        return
    if _active is not None:
        raise DeviceConflictError(framework="LMDeploy", active=_active, given=device_type)
    show_notices()
    is_parent = (
        multiprocessing.parent_process() is None
    )  # notices come once, not from each process of an engine
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
    """Called before an engine is built.

    Raises DeviceConflictError for a device that the view would misplace, and PatchError if a module that was imported
    since is not what an essential patch was written for.
    """
    if _active is None:
        return
    if device_type != _active:
        raise DeviceConflictError(framework="LMDeploy", active=_active, given=device_type)
    _uses.clear()  # those of the engine before
    require()


def require(*uses: str) -> None:
    """Add model types and features to those that the engine uses.

    Raises PatchError if an essential patch for any of them does not fit. Modules that are imported later are checked
    for the same uses.
    """
    _uses.update(uses)
    patches().require_essential(_uses)


def tell_of_misfits() -> None:
    """Log each patch that does not fit this LMDeploy once. Of those that every model needs, log the first only."""
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
    """Warn of patched functions whose code is not the code that was reviewed, though its parameters are."""
    for patch, reviewed in _changed():
        logger.warning(
            "lmdeploy %s: the body of %s is not the one reviewed in %s. A patch replaces it, because the reviewed one "
            "%s. Next step: run `dlinfer contract`, which shows what changed, or install lmdeploy %s",
            patches().version(),
            patch.target,
            reviewed,
            patch.why,
            reviewed,
        )


def show_notices() -> None:
    """Notices go to stderr unless the application has configured logging for us."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("dlinfer: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _tell_of_unknown_settings() -> None:
    """Warn of variables that look like settings and are none: what they were to change stays as it is."""
    for name in settings.unknown(os.environ):
        near = settings.nearest(name)
        hint = f" (did you mean {near}?)" if near else ""
        logger.warning("%s is no setting of dlinfer%s: it changes nothing.", name, hint)
