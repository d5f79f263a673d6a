"""Refuses a model whose weights do not fit into memory, after its layers are made and before a weight is read.

On a device that shares the host's memory, parameters take pages only as they are written. LMDeploy checks free memory
only after that, for the KV cache, so the kernel might kill the process.
"""

import re
from collections.abc import Callable
from typing import Any

from dlinfer.errors import ModelMemoryError
from dlinfer.framework.lmdeploy_ext.device import activation, huge_pages
from dlinfer.framework.lmdeploy_ext.device.kv_memory import gib
from dlinfer.vendor import DeviceMemory

# The message of torch's CPU allocator if the system refuses a single tensor.
_REFUSED = re.compile(r"DefaultCPUAllocator: .* you tried to allocate (\d+) bytes")


def parameter_bytes(model: Any, tied: bool) -> int:
    """Return the size in bytes of a model's parameters, except those on torch's device ``meta``.

    tied: whether the output projection is tied to the embedding; then its own parameter does not count.
    """
    return sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if not parameter.is_meta and not (tied and name.endswith("lm_head.weight"))
    )


def checked(make: Callable[[], Any], tied: bool) -> Any:
    """Call ``make`` and return its model. Raises ModelMemoryError if the weights do not fit into the free memory.

    Free memory is read before the call, since some parameters are written as they are made. On shared memory the
    parameters are put into huge pages, if the system has them. tied: as in ``parameter_bytes``.
    """
    memory = activation.device().memory()
    try:
        model = make()
    except RuntimeError as error:
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise
        raise too_large(f"{gib(int(refused[1]))} for a single weight", memory) from error
    needed = parameter_bytes(model, tied)
    packing = getattr(model, "bf12_packing", None)  # of ``layers.quantised.bf12_packing``
    if packing is not None:  # weights that become BF12 as they load; the largest is whole before it is packed
        needed -= max(packing.saved_bytes - packing.largest_weight, 0)
    if memory.shared:
        if needed > memory.available:
            raise too_large(f"{gib(needed)} for its weights", memory)
        huge_pages.wish_for(parameter for parameter in model.parameters() if not parameter.is_meta)
    return model


def too_large(needed: str, memory: DeviceMemory) -> ModelMemoryError:
    """Return the error for a model that needs more than the free memory. needed: the size as text."""
    return ModelMemoryError(needed=needed, free=gib(memory.available), source=memory.source)
