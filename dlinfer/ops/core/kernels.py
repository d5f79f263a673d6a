"""The kernel table: vendors' kernels, checked and bound to torch's dispatcher.

torch's dispatcher selects a function by dispatch key, which follows from the device. At first a device's key has no
function, so torch calls the function of the generic key (CompositeExplicitAutograd). That function activates the
device's default vendor and dispatches again. From then on the device's own key has a function, which calls the table of
the active vendor. A change of vendor replaces the table, but not the function: torch frees a function that is taken off
the dispatcher, even while another thread is calling it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.library import Library

from dlinfer.errors import InferenceOnlyError, KernelDeclined, KernelSignatureError, UnknownOpError
from dlinfer.ops.core import fallback
from dlinfer.ops.core.spec import NAMESPACE, OpSpec, registry
from dlinfer.vendor import discovery
from dlinfer.vendor.base import Kernel, Vendor, implementations, kernel_name, rule_of

_AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1")
_NO_KERNEL = "the vendor has no kernel for this op"

_libraries: dict[str, Library] = {}  # torch removes a Library's kernels when the Library is freed
_tables: dict[str, dict[str, Callable[..., Any]]] = {}
_authors: dict[str, dict[str, str]] = {}


def install() -> None:
    """Bind every defined op to the dispatcher. Call this once, after all ops are defined."""
    generic = Library(NAMESPACE, "IMPL")
    for name, spec in registry().items():
        _implement(generic, name, _generic(spec), "CompositeExplicitAutograd")
        without_autocast = _without_autocast(spec)
        for key in _AUTOCAST_KEYS:
            _implement(generic, name, without_autocast, key)
    _libraries["generic"] = generic
    discovery.on_activation(bind)


def kernel_authors(vendor: Vendor) -> Mapping[str, str]:
    """Return op -> name of the vendor whose kernel runs the op while ``vendor`` is active.

    That is ``vendor`` itself, or a vendor whose kernels it uses. Ops that run on the reference are not in the dict.
    This loads the kernels; an error while loading is raised.
    """
    if vendor.name not in _authors:
        kernels = discovery.kernels_of(vendor)
        _validate(vendor, kernels)
        _authors[vendor.name] = {op: discovery.author(kernel, vendor) for op, kernel in kernels.items()}
    return _authors[vendor.name]


def several_implementations(vendor: Vendor) -> dict[str, list[str]]:
    """Return op -> names of its kernels in order of preference, for each op with several kernels of ``vendor``."""
    kernels = {op: implementations(kernel) for op, kernel in discovery.kernels_of(vendor).items()}
    return {op: list(map(kernel_name, several)) for op, several in kernels.items() if len(several) > 1}


def bind(device_type: str, vendor: Vendor) -> None:
    """Make a vendor's kernels the kernels of a device type. If this raises, the old kernels stay.

    Raises KernelSignatureError or UnknownOpError for wrong kernels.
    """
    kernels = discovery.kernels_of(vendor)
    _validate(vendor, kernels)
    _tables[device_type] = {
        name: _counting(spec, _bound_kernel(spec, vendor, kernels.get(name)))
        for name, spec in registry().items()
    }
    # On meta tensors, torch calls an op's fake function.
    if device_type not in _libraries and device_type != "meta":
        key = torch._C._dispatch_key_for_device(device_type)  # pyright: ignore[reportPrivateUsage] - has no public name
        library = Library(NAMESPACE, "IMPL")
        for name in registry():
            _implement(library, name, _current(device_type, name), key)
        _libraries[device_type] = library


def _implement(library: Library, name: str, kernel: Callable[..., Any], key: str) -> None:
    library.impl(name, kernel, key)  # pyright: ignore[reportUnknownMemberType] - torch leaves its types out


def _current(device_type: str, name: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_gradients(name, args)
        return _tables[device_type][name](*args)

    return run


def _refuse_gradients(name: str, args: Sequence[Any]) -> None:
    """Raise InferenceOnlyError if an argument requires a gradient: no op of dlinfer has a derivative."""
    for arg in args:
        leaves = cast("list[object]", arg) if isinstance(arg, list) else [arg]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise InferenceOnlyError(what=f"dlinfer.ops.{name}")


def _validate(vendor: Vendor, kernels: Mapping[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        spec = registry().get(name)
        if spec is None:
            raise UnknownOpError(vendor=vendor.name, op=name, known=", ".join(registry()))
        for implementation in implementations(kernel):
            parameters = tuple(inspect.signature(implementation).parameters)
            if parameters != spec.parameters:
                raise _misfit(vendor, "kernel", spec, parameters)
            rule = rule_of(implementation)
            if rule is not None and not _takes_call(inspect.signature(rule), spec.parameters):
                raise _misfit(vendor, "rule of the kernel", spec, tuple(inspect.signature(rule).parameters))


def _misfit(vendor: Vendor, what: str, spec: OpSpec, parameters: tuple[str, ...]) -> KernelSignatureError:
    return KernelSignatureError(
        vendor=vendor.name, what=what, op=spec.name, given=parameters, expected=spec.parameters
    )


def _takes_call(signature: inspect.Signature, names: Sequence[str]) -> bool:
    """Return whether a function takes an op's arguments by position and by name, and needs no other argument."""
    try:
        signature.bind(**dict.fromkeys(names))
        by_position = signature.bind(*names).arguments
    except TypeError:
        return False
    return all(by_position.get(name, name) == name for name in names)


def _bound_kernel(spec: OpSpec, vendor: Vendor, kernel: Kernel | None) -> Callable[..., Any]:
    check, reference = spec.validate, spec.reference
    rule = None if kernel is None else rule_of(kernel)

    if kernel is None:

        def run(*args: Any) -> Any:
            check(*args)
            fallback.take(spec.name, vendor.name, _NO_KERNEL, args)
            return reference(*args)

        return run

    def run_native(*args: Any) -> Any:
        check(*args)
        reason = None if rule is None else rule(*args)
        if reason is None:
            try:
                return kernel(*args)
            except KernelDeclined as declined:
                reason = str(declined)
        fallback.take(spec.name, vendor.name, reason, args)
        return reference(*args)

    return run_native


def _counting(spec: OpSpec, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel so that its writes increment ``tensor._version``, as writes of torch's own ops do."""
    if not spec.mutates:
        return run
    places = tuple(map(spec.parameters.index, spec.mutates))

    def counted(*args: Any) -> Any:
        increment_version([args[place] for place in places])
        return run(*args)

    return counted


def refusal(name: str, device_type: str, args: Sequence[Any]) -> str | None:
    """Return a reason why the device's active vendor would not run a call of op ``name``; None if its kernel would.

    args: the torch op's arguments, real or fake tensors. No kernel is run, so the result is also None for a kernel that
        would raise KernelDeclined only during the call.
    """
    vendor = discovery.activate_default(device_type)
    if vendor is None:
        return f"no installed vendor serves device {device_type!r}"
    kernel = discovery.kernels_of(vendor).get(name)
    if kernel is None:
        return _NO_KERNEL
    rule = rule_of(kernel)
    return None if rule is None else rule(*args)


def _without_autocast(spec: OpSpec) -> Callable[..., Any]:
    """Wrap an op so that it runs with autocast off: autocast would change the dtypes of torch ops inside a kernel."""

    def run(*args: Any) -> Any:
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor)).type
        with torch.autocast(device, enabled=False):
            return spec.overload(*args)

    return run


def _generic(spec: OpSpec) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor)).type
        vendor = discovery.activate_default(device)
        if vendor is not None:
            return spec.overload(*args)
        if torch.is_grad_enabled():
            _refuse_gradients(spec.name, args)
        spec.validate(*args)
        fallback.take(spec.name, "none", f"no installed vendor serves device {device!r}", args)
        return spec.reference(*args)

    return run


def direct_kernel(name: str, device_type: str) -> Callable[..., Any]:
    """Return the function that computes op ``name`` on a device, for compiled graphs.

    The function skips the dispatcher. It also skips the argument rules: they were applied to the graph's fake tensors
    at compile time. If the kernel declines a call, the reference runs it under the fallback policy, as in eager mode.
    """
    vendor = discovery.activate_default(device_type)
    spec = registry()[name]
    kernel = discovery.kernels_of(vendor).get(name) if vendor is not None else None
    if vendor is None or kernel is None:
        return spec.overload

    rule = rule_of(kernel)

    def run(*args: Any, **kwargs: Any) -> Any:
        reason = None if rule is None else rule(*args, **kwargs)
        if reason is None:
            try:
                return kernel(*args, **kwargs)
            except KernelDeclined as declined:
                reason = str(declined)
        call = spec.bind(args, kwargs)
        fallback.take(spec.name, vendor.name, reason, call)
        return spec.reference(*call)

    return run
