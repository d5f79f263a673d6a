"""The kinds of Sophgo chips, and the search for chips or emulators on this machine.

The machine's own chips come first. They need device nodes of the driver, and libsophon, whose interface is that of the
toolchain's libraries. Without a chip, the toolchain's emulators are used."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from dlinfer.vendor.sophgo.runtime import emulator

DEFAULT_EMULATED = "bm1684x"


@dataclass(frozen=True)
class Kind:
    """A kind of chip.

    name: dlinfer's name for it. in_bmodels: its names in bmodels. chip_id: its number from bm_get_chipid.
    restless: whether its emulator waits for work in a busy loop, which takes a whole CPU core.
    sharing: whether BMRuntime shares one working memory among all networks of the chip (child/working_memory.py)."""

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
    """Return dlinfer's name for a chip that a bmodel names; for an unknown chip, the bmodel's name in lower case."""
    return next((kind.name for kind in KINDS.values() if name in kind.in_bmodels), name.lower())


def of_chip_id(number: int) -> str:
    """Return dlinfer's name for a chip by its number from bm_get_chipid; "chip 0x..." for an unknown chip."""
    return next((kind.name for kind in KINDS.values() if kind.chip_id == number), f"chip {number:#x}")


@dataclass(frozen=True)
class Found:
    """The chips that can run bmodels on this machine.

    libsophon: the folder of the machine's libsophon; None if the chips are emulated.
    chips: the device nodes; for emulators, the kinds of chips.
    reason: a text that says which chips were found, or why there are none. advice: what to do if there are none."""

    libsophon: Path | None
    chips: tuple[str, ...]
    reason: str
    advice: str = ""


def find(root: Path = Path("/")) -> Found:
    """Look for chips, then for emulators, without loading a library.

    root: the parent of dev, etc and opt; tests pass another folder."""
    nodes = sorted((root / "dev").glob("bm-sophon[0-9]*"))
    libraries = libsophon(root)
    if nodes and libraries is not None:
        return Found(libraries, tuple(node.name for node in nodes), f"{len(nodes)} devices with {libraries}")
    without = "no Sophgo device" if not nodes else f"{len(nodes)} Sophgo devices, but no libsophon"
    lacking = {name: emulator.missing(name) for name in KINDS}
    emulated = tuple(name for name, what in lacking.items() if not what)
    if emulated:
        return Found(None, emulated, f"{without}; the toolchain has emulators of {', '.join(emulated)}")
    return Found(None, (), f"{without}; {lacking[DEFAULT_EMULATED]}", emulator.ADVICE)


def libsophon(root: Path = Path("/")) -> Path | None:
    """Return the folder with libsophon's libbmrt; None if there is none.

    The folder of libsophon's packages comes first, then the folders of the dynamic linker."""
    usual = root / "opt/sophon/libsophon-current/lib"
    folders = [usual, *map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))]
    for file in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        with contextlib.suppress(OSError):  # it may be unreadable
            lines = file.read_text(errors="replace").splitlines()
            folders += [Path(line.strip()) for line in lines if line.startswith("/")]
    return next((folder for folder in folders if any(folder.glob("libbmrt.so*"))), None)
