"""The installed vendors, and the active one of each device type.

Vendors come from the entry-point group ``dlinfer.vendors``; dlinfer registers its own there too. Nothing is loaded
before its first use. torch's dispatcher knows devices, not vendors, so each device type has one active vendor at a
time; ``ops`` listens for changes and rebinds its kernels.

A vendor package that fails to load is an error if the user names the vendor. Otherwise it is a warning, so that a
broken package does not stop the other vendors.
"""

import contextvars
import inspect
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

import dlinfer
from dlinfer import settings
from dlinfer.errors import (
    DeviceUnknownError,
    DlinferError,
    UnknownVendorError,
    VendorClashError,
    VendorLoadError,
    VendorUnavailableError,
)
from dlinfer.vendor.base import HOST, INTERFACE, Kernel, Probe, Vendor
from dlinfer.vendor.device import Device

GROUP = "dlinfer.vendors"


class VendorWarning(UserWarning):
    """An installed vendor could not be loaded, and dlinfer goes on without it."""


@dataclass(frozen=True)
class Origin:
    """The package that a vendor was loaded from.

    loaded_at: a lower bound in nanoseconds: each module of the package was loaded at this time or later.
    """

    module: str
    distribution: str
    version: str
    loaded_at: int


_lock = threading.RLock()
_loaded: dict[str, Vendor] = {}
_origins: dict[str, Origin] = {}
_active: dict[str, Vendor] = {}
_devices: dict[str, tuple[Vendor, Device]] = {}
kv_orders: dict[str, str] = {}
"""Maps a device type to the order of a KV cache's dimensions for its active vendor. Dynamo guards on the values that
traced code reads here, so the model is recompiled for a vendor with another order. A change replaces the dict.
"""
_asking = contextvars.ContextVar[frozenset[str]]("_asking", default=frozenset())
_listeners: list[Callable[[str, Vendor], None]] = []


def names() -> list[str]:
    """Return the names of all installed vendors, available or not. This loads no vendor."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def get(name: str) -> Vendor:
    """Return the vendor ``name``, loaded at the first call.

    Raises UnknownVendorError if no installed package has it. Raises VendorClashError if two packages have it. Raises
    VendorLoadError if it cannot be loaded.
    """
    with _lock:
        if name not in _loaded:
            entry = _entry(name)
            package = entry.module.partition(".")[0]
            # A package that is loaded already has imported dlinfer, for the class Vendor.
            loaded_at = dlinfer.LOADED_AT if package in sys.modules else time.time_ns()
            _loaded[name] = _load(entry)
            known = entry.dist
            _origins[name] = Origin(
                entry.module, known.name if known else "", known.version if known else "", loaded_at
            )
        return _loaded[name]


def origin(name: str) -> Origin | None:
    """Return the origin of a vendor; None if the vendor has not been loaded."""
    return _origins.get(name)


def _entry(name: str) -> EntryPoint:
    entries = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not entries:
        raise UnknownVendorError(name=name, available=", ".join(names()) or "none")
    first, *others = entries.values()
    if others:
        raise VendorClashError(
            what=f"the vendor name {name!r}", first=_source(first), second=_source(others[0])
        )
    return first


def _source(entry: EntryPoint) -> str:
    owner = entry.dist.name if entry.dist is not None else "an unknown distribution"
    return f"{entry.value} of {owner}"


def _load(entry: EntryPoint) -> Vendor:
    try:
        vendor = entry.load()
    except Exception as cause:  # a plugin may fail in any way; the user needs to know whose fault it is
        raise _load_error(entry.name, _source(entry), cause) from cause
    if not isinstance(vendor, Vendor) or vendor.name != entry.name:
        detail = f"it is {vendor!r}, not a Vendor named {entry.name!r}"
        raise VendorLoadError(vendor=entry.name, source=_source(entry), detail=detail)
    if vendor.interface not in (0, INTERFACE):
        detail = (
            f"it was written for version {vendor.interface} of the vendor interface, and this dlinfer has version "
            f"{INTERFACE} (dlinfer.vendor.base.INTERFACE)"
        )
        raise VendorLoadError(vendor=entry.name, source=_source(entry), detail=detail)
    return vendor


def _load_error(name: str, source: str, cause: Exception) -> VendorLoadError:
    return VendorLoadError(vendor=name, source=source, detail=f"{type(cause).__name__}: {cause}")


def probe(vendor: Vendor) -> Probe:
    """Run a vendor's probe. A probe that raises counts as "not available"."""
    try:
        return vendor.probe()
    except Exception as cause:  # noqa: BLE001 - a plugin's code; its failure is the answer
        reason = f"its probe failed with {type(cause).__name__}: {cause}"
        return Probe(False, reason, "report this to the authors of the package that provides the vendor")


def use(name: str, device_type: str | None = None) -> Vendor:
    """Make a vendor the active one of a device type, for every later op call in the process.

    device_type: by default the vendor's own device type, or "cpu" for a vendor that serves any device. Raises the
    errors of ``get``. Raises VendorUnavailableError if the vendor's probe says no, or if it does not serve
    ``device_type``. Raises VendorLoadError if its kernels cannot be loaded. After an error the previous vendor stays
    active.
    """
    global _active, kv_orders
    vendor = get(name)
    device = device_type or (HOST if vendor.device_type == "any" else vendor.device_type)
    if not vendor.serves(device):
        raise VendorUnavailableError(
            vendor=name,
            reason=f"it serves {vendor.device_type}, not {device}",
            advice="omit device_type",
        )
    answer = probe(vendor)
    if not answer.available:
        raise VendorUnavailableError(vendor=name, reason=answer.reason, advice=answer.next_step)
    with _lock:
        if _active.get(device) is not vendor:
            _announce(device, vendor)
            # A new dict, because readers do not take the lock. The newest vendor comes last.
            others = {name: other for name, other in _active.items() if name != device}
            _active = {**others, device: vendor}
            kv_orders = {**kv_orders, device: vendor.kv_cache_layout.order}
    return vendor


def _announce(device_type: str, vendor: Vendor) -> None:
    for listener in _listeners:
        try:
            listener(device_type, vendor)
        except DlinferError:
            raise
        except Exception as cause:  # loading kernels runs the plugin's code
            raise _load_error(vendor.name, "its kernels", cause) from cause


def most_recent() -> str:
    """Return the name of the vendor activated last in this process.

    If none was activated, activate the default vendor of "cpu". Return "" if there is none.
    """
    with _lock:
        if _active:
            return next(reversed(_active.values())).name
        vendor = activate_default(HOST)
        return vendor.name if vendor is not None else ""


def active(device_type: str) -> Vendor | None:
    """Return the active vendor of a device type; None if no op needed one and the user chose none."""
    return _active.get(device_type)


def activate_default(device_type: str) -> Vendor | None:
    """Return the active vendor of a device type; if there is none yet, activate the default one.

    Return None if no vendor serves the device. Raises the errors of ``default`` and ``use``.
    """
    with _lock:
        if device_type in _active:
            return _active[device_type]
        vendor = default(device_type)
        return vendor and use(vendor.name, device_type)


def default(device_type: str) -> Vendor | None:
    """Return the vendor that the first op call on a device would activate; activate nothing.

    The vendor named by ``DLINFER_VENDOR`` wins if it serves the device. Otherwise the available vendor of highest
    priority wins, and among equals the first by name. If available vendors provide the engine in ``DLINFER_ENGINE``,
    only these vendors are considered, as an engine may need its own vendor's KV-cache layout. Raises the errors of
    ``get`` if DLINFER_VENDOR cannot be loaded. Under the fallback policy ``error``, also raises them for any vendor
    that cannot be loaded if only the reference is left, because the vendor may be the device's own.
    """
    name = settings.current().vendor
    if name and get(name).serves(device_type):
        return get(name)
    vendors, failures = _load_all()
    fitting = [v for v in vendors if v.serves(device_type) and probe(v).available]
    if failures and settings.current().fallback == "error" and all(v.is_reference for v in fitting):
        failures[0].add_note(
            f"Only the reference is left for device {device_type!r}, and the fallback policy is 'error'. "
            "DLINFER_VENDOR=reference uses it."
        )
        raise failures[0]
    engine = settings.current().engine
    providing = [v for v in fitting if engine in v.engines]
    return max(providing or fitting, key=lambda v: v.priority, default=None)


def loadable() -> list[Vendor]:
    """Return every vendor that can be loaded. Warn about each vendor that cannot."""
    return _load_all()[0]


def _load_all() -> tuple[list[Vendor], list[DlinferError]]:
    """Return every vendor that can be loaded, and the errors of the others, which also become warnings."""
    vendors, failures = list[Vendor](), list[DlinferError]()
    for name in names():
        try:
            vendors.append(get(name))
        except (VendorLoadError, VendorClashError) as error:
            warnings.warn(f"a vendor was skipped: {error}", VendorWarning, stacklevel=3)
            failures.append(error)
    return vendors, failures


def kernels_of(vendor: Vendor) -> Mapping[str, Kernel]:
    """Return the kernels that run while a vendor is active: its own or, if it brings none, those of ``host(vendor)``.

    CPU kernels dereference pointers, so they only serve tensors in host memory. If a vendor of another device brings no
    kernels, the mapping is empty.
    """
    token = _asking.set(_asking.get() | {vendor.name})
    try:
        if vendor.load_kernels is not None:
            return vendor.load_kernels()
        return kernels_of(host(vendor)) if vendor.serves(HOST) else {}
    finally:
        _asking.reset(token)


def host(vendor: Vendor) -> Vendor:
    """Return the vendor whose CPU kernels run the ops of a vendor without kernels.

    It is the available vendor of highest priority with kernels for CPU tensors and the same KV-cache layout. A vendor
    whose own kernels are being loaded is skipped, or two vendors could ask each other without end. Raises
    VendorUnavailableError if there is none.
    """
    asking = _asking.get() | {vendor.name}
    hosts = [
        v
        for v in loadable()
        if v.name not in asking
        and v.load_kernels is not None
        and v.serves(HOST)
        and v.kv_cache_layout == vendor.kv_cache_layout
        and probe(v).available
    ]
    if not hosts:
        raise VendorUnavailableError(
            vendor=vendor.name,
            reason="it has no kernels of its own, and no available vendor has any for CPU tensors",
            advice="reinstall dlinfer, which contains the vendor cpu",
        )
    return max(hosts, key=lambda v: v.priority)


def device(device_type: str) -> Device:
    """Return the ``Device`` of a device type, from its active vendor or else from the vendor with the highest priority.

    Raises DeviceUnknownError if no vendor has one. Raises VendorUnavailableError if the chosen vendor cannot run here.
    Raises VendorLoadError if the chosen vendor's code fails.
    """
    vendor = active(device_type)
    if vendor is not None and vendor.load_device is not None:
        return device_of(vendor)  # no probe: it passed at activation, and each step of a model calls this
    vendor = vendor or default(device_type)
    if vendor is not None and vendor.load_device is not None:
        return device_of(use(vendor.name, device_type))
    providers = [v for v in loadable() if v.load_device is not None and v.serves(device_type)]
    if not providers:
        raise DeviceUnknownError(device=device_type, vendors=", ".join(names()))
    vendor = max(providers, key=lambda v: (probe(v).available, v.priority))
    answer = probe(vendor)
    if not answer.available:
        raise VendorUnavailableError(vendor=vendor.name, reason=answer.reason, advice=answer.next_step)
    activate_default(device_type)
    return device_of(vendor)


def device_of(vendor: Vendor) -> Device:
    """Return the ``Device`` of a vendor that has ``load_device``. Raises VendorLoadError if that function fails."""
    assert vendor.load_device is not None, f"vendor {vendor.name!r} has no load_device"
    with _lock:
        if vendor.name not in _devices or _devices[vendor.name][0] is not vendor:
            try:
                _devices[vendor.name] = vendor, vendor.load_device()
            except DlinferError:
                raise
            except Exception as cause:  # a plugin's code may fail in any way
                raise _load_error(vendor.name, "its device", cause) from cause
        return _devices[vendor.name][1]


def author(kernel: Kernel, vendor: Vendor) -> str:
    """Return the name of the vendor whose package defines a kernel; the name of ``vendor`` if no other vendor's does.

    If the kernel wraps another one with ``functools.wraps``, the package of the wrapped kernel counts.
    """
    module = getattr(inspect.unwrap(kernel), "__module__", None) or ""
    for entry in entry_points(group=GROUP):
        if entry.name != vendor.name and (module == entry.module or module.startswith(f"{entry.module}.")):
            return entry.name
    return vendor.name


def on_activation(listener: Callable[[str, Vendor], None]) -> None:
    """Call ``listener(device_type, vendor)`` now for each active vendor, and before each later change."""
    with _lock:
        _listeners.append(listener)
        for device, vendor in _active.items():
            listener(device, vendor)
