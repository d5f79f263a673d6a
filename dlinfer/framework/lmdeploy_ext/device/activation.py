"""Which device of ours LMDeploy runs on in this process, and switching it on.

Choosing one checks the patches and installs the device view; everything else asks here who is active. The patches
themselves are handed in by ``install``, which knows all of them.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from importlib import metadata

from dlinfer import settings
from dlinfer.errors import DeviceConflictError, PatchError
from dlinfer.framework.lmdeploy_ext.device import devices, view
from dlinfer.framework.lmdeploy_ext.versions import describe
from dlinfer.framework.patching import Patch, PatchSet
from dlinfer.vendor import Device, discovery
from dlinfer.vendor.streams import HostStreams

logger = logging.getLogger("dlinfer")

_records: Callable[[], list[Patch]] | None = None
_patches: PatchSet | None = None
_patches_lock = threading.Lock()
_active: str | None = None
_torch_device: str | None = None
_told: set[str] = set()


def provide(records: Callable[[], list[Patch]]) -> None:
    """Say what makes the list of patches. It is called when the first of them is needed."""
    global _records
    _records = records


def patches() -> PatchSet:
    """The patch set of this process."""
    global _patches
    if _patches is None:
        assert _records is not None, "dlinfer.framework.lmdeploy_ext provides them when it is imported"
        made = PatchSet("lmdeploy", _records())  # without the lock, as this imports
        with _patches_lock:  # a second set would take the replacements of the first for originals
            _patches = _patches or made
    return _patches


def active() -> str | None:
    """The device_type of ours that LMDeploy runs on in this process, or None."""
    return _active


def is_on() -> bool:
    """Whether LMDeploy runs on a device of ours in this process: the condition of most patches."""
    return _active is not None


def serves(device_type: str) -> bool:
    """Whether a device_type is one of this adaptor's."""
    return device_type == _active or devices.serves(device_type)


def torch_device() -> str:
    """torch's name of the device that LMDeploy runs on, which is one of ours."""
    assert _torch_device is not None, "LMDeploy runs on one of its own devices"
    return _torch_device


def device() -> Device:
    """What the active vendor says of the device that LMDeploy runs on, which is one of ours."""
    return discovery.device(torch_device())


def is_synchronous() -> bool:
    """Whether calls on the active device return when their work is done, as on the host."""
    return active() is not None and isinstance(device().streams, HostStreams)


def activate(device_type: str) -> None:
    """Make LMDeploy run on one of our devices in this process. Idempotent.

    Raises PatchError when the installed LMDeploy is not what an essential patch was written for, and
    DeviceConflictError when another of our devices is in use. What it does without is logged.
    """
    global _active, _torch_device
    if _active == device_type:
        patches().require_essential()  # of modules that were imported since
        return
    if _active is not None:
        raise DeviceConflictError(framework="LMDeploy", active=_active, given=device_type)
    show_notices()
    _tell_of_unknown_settings()
    inside, line = describe(metadata.version("lmdeploy"))
    if not inside:
        logger.warning("%s", line)
    patches().apply_loaded()
    patches().require_essential()

    name = devices.torch_device(device_type)
    view.install(name, discovery.device(name))
    _active, _torch_device = device_type, name
    tell_of_misfits()


def check_device(device_type: str) -> None:
    """Called before an engine is built. Raises DeviceConflictError for a device that the view would misplace, and
    PatchError where a module that was imported since is not what an essential patch was written for."""
    if _active is None:
        return
    if device_type != _active:
        raise DeviceConflictError(framework="LMDeploy", active=_active, given=device_type)
    patches().require_essential()


def tell_of_misfits() -> None:
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
            logger.warning("%s; device_type %s does not work: %s", line, ", ".join(devices.served()), error)


def show_notices() -> None:
    """Notices go to stderr unless the application has configured logging for us."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("dlinfer: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _tell_of_unknown_settings() -> None:
    """Warn of variables that look like settings and are none: what they were to change stays as it is."""
    if multiprocessing.parent_process() is not None:  # an engine's process: who started it was told
        return
    for name in settings.unknown(os.environ):
        near = settings.nearest(name)
        hint = f" (did you mean {near}?)" if near else ""
        logger.warning("%s is no setting of dlinfer%s: it changes nothing.", name, hint)
