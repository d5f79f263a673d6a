"""Eager kernels: those of the cpu vendor, which see the KV cache as the ops speak of it."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from dlinfer.vendor import discovery
from dlinfer.vendor.base import Kernel
from dlinfer.vendor.openvino.layout import LAYOUT

_CACHES = ("k_cache", "v_cache", "k_scales_zeros", "v_scales_zeros")


def kernels() -> Mapping[str, Kernel]:
    """Op name -> kernel."""
    return {name: _on_views(kernel) for name, kernel in discovery.kernels_of(discovery.get("cpu")).items()}


def _on_views(kernel: Kernel) -> Kernel:
    """Wrap a kernel of the cpu vendor for caches of LAYOUT: it gets views of them in its own layout, without copies."""
    names = list(inspect.signature(kernel).parameters)
    places = [names.index(name) for name in _CACHES if name in names]
    if not places:
        return kernel

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        for place in places:
            if given[place].dim() == len(LAYOUT.order):  # the one scale of an fp8 cache is no cache
                given[place] = LAYOUT.canonical(given[place])
        return kernel(*given)

    return run
