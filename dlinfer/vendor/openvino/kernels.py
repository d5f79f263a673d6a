"""Eager kernels: the cpu vendor's, on views of the KV cache in the ops' own layout."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from dlinfer.vendor import discovery
from dlinfer.vendor.base import Kernel
from dlinfer.vendor.openvino.layout import LAYOUT

_CACHES = ("k_cache", "v_cache", "k_scales_zeros", "v_scales_zeros")


def kernels() -> Mapping[str, Kernel]:
    return {name: _on_views(kernel) for name, kernel in discovery.kernels_of(discovery.get("cpu")).items()}


def _on_views(kernel: Kernel) -> Kernel:
    """Wrap a kernel of the cpu vendor: it gets KV caches of LAYOUT as views in the ops' own layout."""
    names = list(inspect.signature(kernel).parameters)
    places = [names.index(name) for name in _CACHES if name in names]
    if not places:
        return kernel

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        for place in places:
            if arguments[place].dim() == len(LAYOUT.order):  # not the single scale of an fp8 cache
                arguments[place] = LAYOUT.canonical(arguments[place])
        return kernel(*arguments)

    return run
