"""Which device a graph runs on, and what the process has set for devices."""

from collections.abc import Iterable
from typing import Any

import torch

HOST = "cpu"
"""torch's name of the process's own machine. Graphs of every device take its tensors as well: lengths, scalars."""

_LAST = {HOST: 1, "meta": 2}  # tensors without memory, beside others, are there for their sizes


def graph_device(values: Iterable[Any]) -> torch.device:
    """Where a graph runs: the device of the first tensor on an accelerator, else the host, else meta.

    values: tensors, or anything with a ``device``; everything else is passed over. A model on an accelerator often
    takes lengths and positions from the host, so the first tensor alone tells nothing.
    """
    devices = (value.device for value in values if isinstance(getattr(value, "device", None), torch.device))
    return min(devices, key=lambda device: _LAST.get(device.type, 0), default=torch.device(HOST))


def autocast() -> dict[str, str]:
    """Device type -> dtype, of the host and this process's accelerator where autocast is on."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = (HOST,) if accelerator is None else (HOST, accelerator.type)
    return {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)}
