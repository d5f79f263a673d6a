"""The eager kernels are the cpu vendor's. They get views of the KV cache in the order of dimensions that they expect.

The cache itself has the layout of OpenVINO's attention (``layout.py``).
"""

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
    """Wrap a kernel of the cpu vendor.

    The wrapped kernel takes KV caches of LAYOUT, and passes views of them to ``kernel``.
    """
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
