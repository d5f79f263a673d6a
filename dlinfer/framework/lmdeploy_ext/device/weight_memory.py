"""A model whose weights do not fit is refused when its layers are made, before a weight is read.

On a device that shares the host's memory, parameters take pages as they are written. LMDeploy would fill them until the
kernel kills the process, and look at what is free only afterwards, to size the KV cache.
"""

import re
from collections.abc import Callable
from typing import Any

from dlinfer.errors import ModelMemoryError
from dlinfer.framework.lmdeploy_ext.device import activation, huge_pages
from dlinfer.framework.lmdeploy_ext.device.kv_memory import gib
from dlinfer.vendor import DeviceMemory

# What torch's CPU allocator says where the system refuses a single tensor.
_REFUSED = re.compile(r"DefaultCPUAllocator: .* you tried to allocate (\d+) bytes")


def parameter_bytes(model: Any, tied: bool) -> int:
    """Bytes of a module's parameters, but for those on torch's device ``meta``.

    tied: the output projection takes the embedding's place once weights are loaded, and is not filled.
    """
    return sum(
        one.numel() * one.element_size()
        for name, one in model.named_parameters()
        if not one.is_meta and not (tied and name.endswith("lm_head.weight"))
    )


def checked(make: Callable[[], Any], tied: bool) -> Any:
    """The model that ``make`` gives. Raises ModelMemoryError, with bytes needed and free, where it does not fit.

    What is free is asked before: some parameters are written as they are made. Those in the host's memory will be in
    large pages, if the system has them.
    """
    memory = activation.device().memory()
    try:
        model = make()
    except RuntimeError as error:
        found = _REFUSED.search(str(error))
        if found is None:
            raise
        raise _too_large(int(found[1]), "a single weight", memory) from error
    needed = parameter_bytes(model, tied) - _saved_bytes(model)
    if memory.shared:
        if needed > memory.available:
            raise _too_large(needed, "its weights", memory)
        huge_pages.wish_for(one for one in model.parameters() if not one.is_meta)
    return model


def _saved_bytes(model: Any) -> int:
    """What weights that become BF12 as they load take less, but for the largest, which is whole before it is packed."""
    packing = getattr(model, "bf12_packing", None)  # of ``layers.quantised.bf12_packing``
    return 0 if packing is None else max(packing.saved_bytes - packing.largest_weight, 0)


def _too_large(needed: int, part: str, memory: DeviceMemory) -> ModelMemoryError:
    return ModelMemoryError(
        needed=f"{gib(needed)} for {part}", free=gib(memory.available), source=memory.source
    )
