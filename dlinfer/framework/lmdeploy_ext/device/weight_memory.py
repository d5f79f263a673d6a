"""Refuses a model that does not fit into memory, after its layers are built and before weights are read.

On a device that uses the host's memory, a parameter takes memory only when it is written. LMDeploy checks the free
memory only when it sizes the KV cache. By that time the kernel may have killed the process.
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
    """Return the size in bytes of a model's parameters, without those on torch's device ``meta``.

    tied: whether the output projection is tied to the embedding. Then the projection's own parameter is not counted.
    """
    return sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if not parameter.is_meta and not (tied and name.endswith("lm_head.weight"))
    )


def checked(make: Callable[[], Any], tied: bool) -> Any:
    """Return the model that ``make`` builds. Raises ModelMemoryError if its weights exceed the free memory.

    The free memory is read before ``make`` runs, because some parameters are written when they are created. Parameters
    in host memory are put into huge pages if the system has them. tied: whether the output projection is tied to the
    embedding.
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
    packing = getattr(model, "packing", None)  # of ``layers.quantised.packing`` or ``gguf_packing``
    if packing is not None:
        # Weights are packed while they load (bf12, int8, int4). The largest one is in memory unpacked until then.
        needed -= max(packing.saved_bytes - packing.largest_weight, 0)
    if memory.shared:
        if needed > memory.available:
            raise too_large(f"{gib(needed)} for its weights", memory)
        huge_pages.wish_for(parameter for parameter in model.parameters() if not parameter.is_meta)
    return model


def too_large(needed: str, memory: DeviceMemory) -> ModelMemoryError:
    """Return the error for a model that needs more than the free memory. needed: the needed size as text."""
    return ModelMemoryError(needed=needed, free=gib(memory.available), source=memory.source)
