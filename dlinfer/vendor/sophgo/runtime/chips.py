"""Which Sophgo chips there are, which of them this machine has, and what stands in for them.

A chip in the machine comes first: a device node of its driver and libsophon, whose libraries are the toolchain's
with the driver behind them. Without one the emulators of the toolchain are asked.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from dlinfer.vendor.sophgo.runtime import emulator

DEFAULT_EMULATED = "bm1684x"


@dataclass(frozen=True)
class Kind:
    """A kind of chip: our name of it, the names that bmodels give it, and what bm_get_chipid answers.

    restless: whether its emulator waits for work in a loop that takes a whole core.
    sharing: whether BMRuntime has all its networks work in one memory (child/working_memory.py).
    """

    name: str
    in_bmodels: tuple[str, ...]
    chip_id: int
    restless: bool = False
    sharing: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("bm1684x", ("BM1684X",), 0x1686, restless=True, sharing=True),
        Kind("bm1688", ("BM1688", "BM1686"), 0x1686A200),
    )
}


def of_bmodel(name: str) -> str:
    """Our name of a chip that a bmodel names; the bmodel's own name where it is none that we know."""
    return next((kind.name for kind in KINDS.values() if name in kind.in_bmodels), name.lower())


def of_chip_id(number: int) -> str:
    """Our name of a chip that bm_get_chipid answers with."""
    return next((kind.name for kind in KINDS.values() if kind.chip_id == number), f"chip {number:#x}")


@dataclass(frozen=True)
class Found:
    """What can run bmodels here: ``libsophon`` of a chip in the machine, or names of chips that are emulated."""

    libsophon: Path | None
    chips: tuple[str, ...]
    reason: str
    advice: str = ""


def find(root: Path = Path("/")) -> Found:
    """Look for a chip, then for emulators; opens no library. ``root`` is where /dev and /opt are looked for."""
    nodes = sorted((root / "dev").glob("bm-sophon[0-9]*"))
    libraries = libsophon(root)
    if nodes and libraries is not None:
        return Found(libraries, tuple(node.name for node in nodes), f"{len(nodes)} devices with {libraries}")
    without = "no Sophgo device" if not nodes else f"{len(nodes)} Sophgo devices, but no libsophon"
    lacking = {name: emulator.missing(name) for name in KINDS}
    emulated = tuple(name for name, what in lacking.items() if not what)
    if emulated:
        return Found(None, emulated, f"{without}; the toolchain's emulators of {', '.join(emulated)}")
    return Found(None, (), f"{without}; {lacking[DEFAULT_EMULATED]}", emulator.ADVICE)


def libsophon(root: Path = Path("/")) -> Path | None:
    """Return the folder of libsophon's libbmrt: where its packages put it, else where the linker looks."""
    usual = root / "opt/sophon/libsophon-current/lib"
    folders = [usual, *map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))]
    for file in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        with contextlib.suppress(OSError):  # one that may not be read
            lines = file.read_text(errors="replace").splitlines()
            folders += [Path(line.strip()) for line in lines if line.startswith("/")]
    return next((folder for folder in folders if any(folder.glob("libbmrt.so*"))), None)
