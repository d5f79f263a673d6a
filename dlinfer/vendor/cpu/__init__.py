"""The cpu vendor: C++ kernels and vectorised torch for any CPU that torch runs on. dlinfer falls back to it."""

from collections.abc import Mapping
from typing import Any

from dlinfer.vendor.base import INTERFACE, Kernel, Probe, Vendor
from dlinfer.vendor.claims import Claim, Claims, Proof, Proofs
from dlinfer.vendor.device import Device


def _probe() -> Probe:
    import torch

    from dlinfer.vendor.cpu import compiler

    version = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    try:
        compiler.compiler()
    except (compiler.BuildError, ValueError) as missing:  # ValueError: CXX cannot be read
        from dlinfer.vendor.cpu import (
            native,  # its import takes long, and only a machine without a compiler needs it
        )

        if not native.library_name():  # the wheel has none for this CPU and torch
            reason = f"{version}; plain torch runs in place of the C++ kernels: {missing}"
            return Probe(True, reason, "apt install g++")
    return Probe(True, version)


def _kernels() -> Mapping[str, Kernel]:
    import dlinfer.ops  # noqa: F401 - first: while it is imported it asks for these kernels, of which some import it
    from dlinfer.vendor.cpu.kernels import KERNELS

    return KERNELS


def _claims() -> Claims:
    from dlinfer.ops import registry

    return dict.fromkeys(registry(), Claim())


def _proofs() -> Proofs:
    from dlinfer.ops import registry

    return dict.fromkeys(registry(), Proof.RUNTIME)


def _engine(name: str) -> Any:
    from dlinfer.vendor.cpu.inductor.engine import InductorEngine

    return InductorEngine()


def _device() -> Device:
    from dlinfer.vendor.cpu.device import CpuDevice

    return CpuDevice()


VENDOR = Vendor(
    name="cpu",
    device_type="cpu",
    summary="any CPU that torch runs on",
    probe=_probe,
    load_kernels=_kernels,
    engines=("inductor",),
    default_engine="inductor",
    load_engine=_engine,
    load_device=_device,
    claims=_claims,
    proofs=_proofs,
    interface=INTERFACE,
    priority=10,  # plugins for the same device may claim more
)
