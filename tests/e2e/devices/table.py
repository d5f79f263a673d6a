"""The simulated devices, a row each: what a process sees that runs on one, and what is known not to run there.

A simulation stands where the vendor's torch package would: a distribution whose entry point in ``torch.backends`` makes
the device when torch is imported. LMDeploy is unmodified and told ``device_type`` alone.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.vendor.maca.simulated_card import triton_package
from tests.workers import ROOT


@dataclass(frozen=True)
class SimulatedDevice:
    """One vendor's.

    device_type: LMDeploy's name of it. torch_device: torch's, on which caches and weights have to lie.
    simulation: ``module:function`` that makes the device. vendor: ``module:object`` of the Vendor.
    dtype: what the models compute in; the vendor's kernels may take no float32.
    on_references: (family, op) -> why the reference answers it. Any other op on a reference fails the cell.
    refused: family -> why it is not served there; such a family is not asked.
    packages: folders of the vendor's other packages, or of stand-ins for them. variables: others of its processes.
    missing: why it cannot be simulated on this machine, with the next step; empty where it can.
    """

    device_type: str
    torch_device: str
    simulation: str
    vendor: str
    dtype: str = "float16"
    on_references: dict[tuple[str, str], str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    packages: tuple[Path, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    missing: Callable[[], str] = str

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables of a process that has the device. folder: where its distribution is written."""
        distribution(folder, f"simulated-{self.device_type}", self.device_type, self.simulation, self.vendor)
        folders = (folder, *self.packages, ROOT, os.environ.get("PYTHONPATH"))
        return self.variables | {"PYTHONPATH": os.pathsep.join(str(one) for one in folders if one)}


def distribution(folder: Path, name: str, vendor_name: str, simulation: str, vendor: str) -> None:
    """What pip would leave of a package that brings a device and its vendor: metadata and entry points."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = f"[torch.backends]\n{name} = {simulation}\n\n[dlinfer.vendors]\n{vendor_name} = {vendor}\n"
    (info / "entry_points.txt").write_text(points)


LATENT = "deepseek_v2_latent"

DEVICES = {
    device.device_type: device
    for device in (
        SimulatedDevice(
            device_type="ascend",
            torch_device="npu",
            simulation="tests.vendor.ascend.simulated_npu.install:install",
            vendor="dlinfer.vendor.ascend:VENDOR",
        ),
        SimulatedDevice(
            device_type="maca",
            torch_device="maca",
            simulation="tests.vendor.maca.simulated_card.install:install",
            vendor="dlinfer.vendor.maca:VENDOR",
            packages=(ROOT / "tests" / "vendor" / "maca" / "packages", triton_package.folder()),
            variables={"TRITON_INTERPRET": "1"},
            missing=triton_package.missing,
        ),
        SimulatedDevice(
            device_type="camb",
            torch_device="mlu",
            simulation="tests.vendor.camb.simulated_mlu.install:install",
            vendor="dlinfer.vendor.camb:VENDOR",
        ),
    )
}
