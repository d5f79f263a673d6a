"""The device types that this adaptor gives to LMDeploy. Imports nothing, since every LMDeploy import reads it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServedDevice:
    """A device_type of ours.

    torch_device: torch's name of the device that tensors live on.
    max_batch_size: LMDeploy's default for ``max_batch_size`` on it.
    """

    torch_device: str
    max_batch_size: int


SERVED = {
    # Decode on a CPU is bound by memory bandwidth; past some tens of sequences a larger batch only adds latency.
    "cpu": ServedDevice(torch_device="cpu", max_batch_size=64),
}

OWN = ("cuda", "ascend", "maca", "camb")
"""The device types that LMDeploy 0.18 itself accepts."""
