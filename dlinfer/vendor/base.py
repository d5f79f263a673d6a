"""The class Vendor: a provider of kernels and engines for one kind of device.

Creating a Vendor object is cheap; the vendor's SDK and kernels are loaded on first use. This file imports neither ops
nor graphs, so ops can ask for the active vendor without an import cycle.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlinfer.errors import KernelDeclined, KernelRuleError
from dlinfer.toolchain.recipe import Toolchain
from dlinfer.vendor.claims import Claims, Proofs
from dlinfer.vendor.device import Device

if TYPE_CHECKING:  # dlinfer serve imports this module, and needs no torch
    from torch import Tensor

HOST = "cpu"
"""torch's device type of this machine's own processor."""

INTERFACE = 1
"""Version of the vendor interface. It rises when vendors that were written for the previous version stop working."""

Kernel = Callable[..., object]
Rule = Callable[..., str | None]


def refuses(rule: Rule) -> Callable[[Kernel], Kernel]:
    """Attach a rule to a kernel. The rule tells callers, before the kernel runs, which calls the kernel refuses.

    rule: takes the op's arguments, and returns the reason for a refusal, or None if the kernel takes the call. Tensors
    may be fake tensors, so the rule reads dtypes, ranks, sizes and devices, never values. KV caches come in the
    vendor's layout. A call raises KernelRuleError if the rule returns anything else, such as True, False or "".

    If the decision depends on values, the kernel itself raises KernelDeclined, before it writes anything.
    """

    def with_rule(kernel: Kernel) -> Kernel:
        @functools.wraps(rule)
        def checked(*args: Any, **kwargs: Any) -> str | None:
            reason: object = rule(*args, **kwargs)
            if reason is None or (isinstance(reason, str) and reason):
                return reason
            raise KernelRuleError(rule=kernel_name(rule), kernel=kernel_name(kernel), given=repr(reason))

        kernel.refuses = checked  # pyright: ignore[reportFunctionMemberAccess]
        return kernel

    return with_rule


def rule_of(kernel: Kernel) -> Rule | None:
    """Return the rule that ``refuses`` attached. None: the kernel takes every call, or decides while it runs."""
    return getattr(kernel, "refuses", None)


def in_order(*kernels: Kernel) -> Kernel:
    """Combine several implementations of an op into one kernel, the preferred one first.

    A call runs on the first implementation whose rule does not refuse and which does not raise KernelDeclined. If none
    takes the call, the combined kernel declines it and gives the reasons of all.
    """

    def rule(*args: Any, **kwargs: Any) -> str | None:
        reasons: list[str] = []
        for kernel in kernels:
            asked = rule_of(kernel)
            reason = None if asked is None else asked(*args, **kwargs)
            if reason is None:
                return None
            reasons.append(f"{kernel_name(kernel)}: {reason}")
        return "; ".join(reasons)

    @refuses(rule)
    @functools.wraps(kernels[0])
    def run(*args: Any, **kwargs: Any) -> object:
        reasons: list[str] = []
        for kernel in kernels:
            asked = rule_of(kernel)
            reason = None if asked is None else asked(*args, **kwargs)
            if reason is None:
                try:
                    return kernel(*args, **kwargs)
                except KernelDeclined as declined:
                    reason = str(declined)
            reasons.append(f"{kernel_name(kernel)}: {reason}")
        raise KernelDeclined(reason="; ".join(reasons))

    run.implementations = kernels  # pyright: ignore[reportFunctionMemberAccess]
    return run


def implementations(kernel: Kernel) -> tuple[Kernel, ...]:
    """Return the implementations that ``in_order`` combined, or the kernel itself if it is the only one."""
    return getattr(kernel, "implementations", (kernel,))


def kernel_name(kernel: Kernel) -> str:
    """Return the module and the name of an implementation, for messages."""
    return f"{kernel.__module__}.{getattr(kernel, '__qualname__', repr(kernel))}"


@dataclass(frozen=True)
class Probe:
    """Tells whether a vendor can run on this machine. A ``probe`` function must be cheap and must not raise.

    available: whether it can run.
    reason: why not, or the device that was found.
    next_step: advice to the user if it cannot run, or not well.
    """

    available: bool
    reason: str
    next_step: str = ""


@dataclass(frozen=True)
class KVCacheLayout:
    """The order of the four dimensions in a vendor's paged KV cache.

    order: the dimensions from outer to inner: B block, S slot in the block, H KV head, D head size. The ops describe
        caches as [blocks, block_size, kv_heads, head_size] = "BSHD".
    block_size: the number of slots in a block that the vendor's kernels or engines need; None if any number will do.
    """

    order: str = "BSHD"
    block_size: int | None = None

    def shape(self, blocks: int, block_size: int, kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return the shape of a cache of this layout."""
        sizes = {"B": blocks, "S": block_size, "H": kv_heads, "D": head_size}
        return tuple(sizes[dim] for dim in self.order)

    def canonical(self, cache: "Tensor") -> "Tensor":
        """Return a view of ``cache`` as [blocks, block_size, kv_heads, head_size], on the same memory."""
        if self.order == "BSHD":
            return cache
        return cache.permute(*(self.order.index(dim) for dim in "BSHD"))


@dataclass(frozen=True)
class Vendor:
    """One vendor: its name, the device type that it serves, and functions that load the rest.

    name: unique among installed vendors; what users write in ``vendor.use()``.
    device_type: torch's type of the device that its kernels serve ("cpu", "npu", ...), or "any".
    summary: one line for people.
    probe: returns whether the vendor can run here, and why not.
    load_kernels: returns a mapping from op names to kernels; called once, at activation. A kernel may combine several
        implementations by ``in_order``.
        None: the vendor has graph engines only. If the vendor's tensors are in host memory, a CPU vendor's kernels run
        the ops outside graphs. Otherwise the reference runs these ops, under the fallback policy
        (``discovery.kernels_of``).
    load_device: returns the ``Device`` that serving frameworks need; called once, and may initialise the device. None
        if another vendor provides it for the same device type.
    framework_device: the frameworks' name of the device, as in LMDeploy's ``device_type``; default: the vendor's name.
    priority: the available vendor with the highest priority is a device's default, unless DLINFER_VENDOR names another
        vendor, or DLINFER_ENGINE an engine that only other vendors provide.
    kv_cache_layout: the layout of the paged KV cache that its kernels expect.
    engines: names of its graph engines.
    load_engine: returns an engine by name.
    default_engine: the engine for graphs on its device if the user names none.
    toolchain: returns the recipe of a second Python environment, for a vendor whose packages exist only for an older
        Python.
    is_reference: its kernels are the ops' own bodies, so running them does not count as a fallback.
    claims: returns the ops and dtypes that its kernels serve, for ``dlinfer conformance``. None: every op that has a
        kernel counts as claimed in part.
    proofs: returns how far each kernel was tested, without loading an SDK. None: the vendor is left out of the table of
        ops by vendor.
    interface: the ``INTERFACE`` that the vendor was written for; a number other than dlinfer's is refused. 0: unknown,
        and accepted.
    """

    name: str
    device_type: str
    summary: str
    probe: Callable[[], Probe]
    load_kernels: Callable[[], Mapping[str, Kernel]] | None = None
    priority: int = 0
    kv_cache_layout: KVCacheLayout = KVCacheLayout()
    is_reference: bool = False
    engines: tuple[str, ...] = ()
    default_engine: str | None = None
    load_engine: Callable[[str], Any] | None = None
    toolchain: Callable[[], Toolchain] | None = None
    load_device: Callable[[], Device] | None = None
    framework_device: str = ""
    claims: Callable[[], Claims] | None = None
    proofs: Callable[[], Proofs] | None = None
    interface: int = 0

    def serves(self, device_type: str) -> bool:
        """Return whether the vendor can serve tensors on ``device_type``."""
        return self.device_type in (device_type, "any")

    def puts_frameworks_on(self, name: str) -> bool:
        """Return whether ``name`` is the frameworks' name of this vendor's device. A vendor may have no device."""
        return self.load_device is not None and name == (self.framework_device or self.name)
