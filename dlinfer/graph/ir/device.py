"""The device of a graph, and the autocast settings of devices."""

from collections.abc import Iterable

import torch

HOST = "cpu"
"""The host's device type. Graphs for any device also take tensors on the host, such as lengths."""

_LAST = {HOST: 1, "meta": 2}  # tensors on meta only carry sizes


def graph_device(values: Iterable[object]) -> torch.device:
    """Return a graph's device: that of the first value on an accelerator, else the host, else meta.

    values: the graph's values; values without a ``device`` are ignored. A model on an accelerator often takes lengths
    and positions from the host, so the first tensor alone does not decide.
    """
    devices = (getattr(value, "device", None) for value in values)
    known = (device for device in devices if isinstance(device, torch.device))
    return min(known, key=lambda device: _LAST.get(device.type, 0), default=torch.device(HOST))


def autocast() -> dict[str, str]:
    """Return device type -> autocast dtype, for each of the host and the accelerator that has autocast on."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = (HOST,) if accelerator is None else (HOST, accelerator.type)
    return {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)}
