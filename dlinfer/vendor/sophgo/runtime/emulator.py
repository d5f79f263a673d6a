"""Where the chip emulators of the toolchain lie, and a folder for each that looks like libsophon's.

The emulator of a chip is its ``libcmodel`` with the toolchain's own libbmlib and libbmrt; they find one another by
fixed names in the folder that they are opened from.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from dlinfer.settings import cache_folder
from dlinfer.toolchain import find, state
from dlinfer.vendor.sophgo.errors import SophgoUnavailableError
from dlinfer.vendor.sophgo.toolchain import TOOLCHAIN

ADVICE = "install Sophgo's toolchain with `make toolchains` (or `dlinfer toolchain install sophgo`)"
_CACHE_ADVICE = "set DLINFER_CACHE_DIR to a folder that can be written"
SHIM = "libshim.so"
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_SECONDS = 60

# Name that the libraries ask for -> file of the toolchain; {chip} is the chip's name.
_LINKS = {
    "libbmrt.so.1.0": "libbmrt.so.1.0",
    "libbmlib.so.0": "libbmlib_bm1684x.so.0",
    "libcmodel.so": "libcmodel_{chip}.so",
    "libcpuop.so": "libcpuop.so",
}


def missing(chip: str) -> str:
    """Return what the emulator of a chip lacks, or nothing."""
    known = state(TOOLCHAIN)
    if not known.installed:
        return f"of Sophgo's toolchain, which has the emulators, {known.reason}"
    lacking = [file.name for file in _files(chip).values() if not file.exists()]
    return f"the toolchain has no {', '.join(lacking)}" if lacking else ""


def folder(chip: str) -> Path:
    """Return a folder from which the emulator of a chip can be opened. Raises SophgoUnavailableError."""
    what = f"the emulator of {chip}"
    lacking = missing(chip)
    if lacking:
        raise SophgoUnavailableError(what=what, reason=lacking, advice=ADVICE)
    place = cache_folder() / "sophgo" / "emulators" / chip
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, file in _files(chip).items():
            _link(place / name, file)
    except OSError as error:
        reason = f"its folder cannot be made: {error}"
        raise SophgoUnavailableError(what=what, reason=reason, advice=_CACHE_ADVICE) from None
    return place


def without_shim(place: Path) -> str:
    """Why there is nothing between BMRuntime and bmlib in the emulator of this folder; nothing where there is.

    That is a few lines of C (shim.c), which are compiled here at first use. Without them an emulator is one device, and
    one that shares its networks' working memory takes no networks that need any.
    """
    source = Path(__file__).with_name("shim.c")
    library = place / SHIM
    if library.exists() and library.stat().st_mtime >= source.stat().st_mtime:
        return ""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return f"there is no C compiler ({', '.join(_COMPILERS)})"
    try:
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            made = Path(scratch) / SHIM
            command = [compiler, "-O1", "-shared", "-fPIC", "-o", made, source]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_SECONDS, check=False
            )
            if done.returncode:
                return f"{compiler} failed: {done.stderr.decode(errors='replace').strip()[-200:]}"
            os.replace(made, library)
    except subprocess.TimeoutExpired:
        return f"{compiler} did not end in {_COMPILE_SECONDS} seconds"
    except OSError as error:
        return f"{error}"
    return ""


def _files(chip: str) -> dict[str, Path]:
    libraries = find(TOOLCHAIN).site_packages / "tpu_mlir" / "lib"
    return {name: libraries / file.format(chip=chip) for name, file in _LINKS.items()}


def _link(link: Path, target: Path) -> None:
    """Make or mend a link; another process may be doing the same."""
    with contextlib.suppress(OSError):
        if link.readlink() == target:
            return
    with tempfile.TemporaryDirectory(dir=link.parent) as scratch:
        made = Path(scratch) / link.name
        made.symlink_to(target)
        os.replace(made, link)
