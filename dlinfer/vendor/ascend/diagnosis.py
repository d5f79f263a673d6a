"""Diagnose why torch_npu cannot be used here, from its load error and the files on this machine.

Paths and variables are those of CANN's own ``set_env.sh`` and of the driver's installer.
"""

import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from dlinfer.vendor.base import Probe

TESTED = "2.13.0"
"""The version of torch_npu whose schemas and documents the kernels follow."""

INSTALLED = Path("/usr/local/Ascend")
HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
MANAGER = Path("/dev/davinci_manager")
"""The driver's device file. In the same folder lies one file ``davinciN`` for each card."""

_DRIVER = ("libascend_hal", "libdrvdsmi_host", "libdcmi")
_TRANSFORMERS = ("libatb",)  # of the package NNAL, with its own set_env.sh
_MISSING = re.compile(r"(lib[\w.+-]+?)\.so[\w.]*: cannot open shared object file")


def torch_npu_version() -> str:
    """Return the installed version of torch_npu, or "" if it is not installed."""
    try:
        return importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def not_installed() -> Probe:
    return Probe(
        False,
        "torch_npu is not installed",
        f"install CANN, torch {TESTED} and torch_npu {TESTED}: docs/start/install.md",
    )


def other_version() -> Probe | None:
    """Return a failed probe if torch_npu is installed in another release than torch; else None."""
    there, here = torch_npu_version(), torch.__version__.split("+")[0]
    if not there or there.split("+")[0].split(".post")[0] == here:
        return None
    step = f"pip install torch=={TESTED} torch_npu=={TESTED}"
    return Probe(
        False, f"torch_npu {there} does not fit torch {here}", f"install the same version of both: {step}"
    )


def not_loaded(cause: Exception, environment: Mapping[str, str] = os.environ) -> Probe:
    first = str(cause).strip().partition("\n")[0]
    said = f"{type(cause).__name__}: {first}"
    library = _MISSING.search(str(cause))
    if library is None:
        step = (
            f"check that torch_npu {TESTED}, torch {TESTED} and CANN fit together; npu-smi info shows "
            "the driver"
        )
        return Probe(False, f"torch_npu cannot be loaded: {said}", step)
    name = library[1]
    if name.startswith(_DRIVER):
        return Probe(False, f"the NPU's driver is missing: {said}", _driver_step())
    if name.startswith(_TRANSFORMERS):
        return Probe(False, f"CANN's package NNAL is missing: {said}", _source("nnal/atb", "NNAL"))
    home = next((environment[key] for key in HOME_VARIABLES if environment.get(key)), "")
    if home:
        step = (
            f"install the CANN release for torch_npu {torch_npu_version() or TESTED}, and source its "
            "set_env.sh"
        )
        return Probe(False, f"CANN in {home} lacks {name}.so: {said}", step)
    return Probe(
        False,
        f"CANN's environment is not set ({HOME_VARIABLES[0]} is empty): {said}",
        _source("ascend-toolkit", "CANN"),
    )


def no_cards() -> Probe:
    """Return the failed probe for a torch_npu that loads but finds no card."""
    if MANAGER.exists():
        return Probe(
            False,
            "torch_npu sees no NPU",
            "list the cards with npu-smi info, and check that ASCEND_RT_VISIBLE_DEVICES does not hide them",
        )
    return Probe(False, f"torch_npu sees no NPU, and there is no {MANAGER}", _driver_step())


def _source(folder: str, package: str) -> str:
    """Return advice for a package of CANN: source its set_env.sh if that file exists, or else install the package."""
    script = INSTALLED / folder / "set_env.sh"
    if script.is_file():
        return f"source {script}"
    return f"install {package}, and source its set_env.sh (usually {script})"


def _driver_step() -> str:
    return (
        "install the driver and firmware of the card (npu-smi info then lists it); for a container, pass "
        f"{MANAGER}, /dev/davinciN and {INSTALLED}/driver into it"
    )
