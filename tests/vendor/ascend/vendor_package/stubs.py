"""Libraries in place of CANN's, so that torch_npu's binaries load: every function they miss does nothing and gives 0.

What is missing is read from the binaries, so the list follows the version. Nothing of it can compute: an op that is
called on a tensor of the device would follow null pointers. It is good for what binaries say of themselves when they
are loaded, such as the schemas of their ops.
"""

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

SYSTEM = (
    "libstdc++.so.6",
    "libm.so.6",
    "libc.so.6",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
)
_DATA = ("_ZTI", "_ZTV", "_ZTS")  # run-time types, their tables and names, which are no functions
_WORDS = 64  # of a table of virtual functions, more than any here has
_OTHERS = (
    "Py",
    "_Py",
    "_ITM_",
    "__gmon_start__",
    "_ZTH",
)  # the interpreter's, the linker's, and thread-local wrappers

ANSWERS = {
    "aclrtGetSocName": ("const char *", '"Ascend910B2"'),
    "aclGetRecentErrMsg": ("const char *", '"a stub"'),
}
"""Functions that give text; a null pointer would be read."""


def binaries(package: Path) -> list[Path]:
    """The shared objects of an unpacked torch_npu that are loaded when it is imported."""
    return sorted(
        path
        for path in package.rglob("*.so*")
        if "onnx" not in path.parts and path.is_file() and path.read_bytes()[:4] == b"\x7fELF"
    )


def build(package: Path, torch_libraries: Path, folder: Path) -> list[Path]:
    """Write a stub for each library that the package needs and this machine has not. Needs gcc, nm and readelf."""
    folder.mkdir(parents=True, exist_ok=True)
    inside = binaries(package)
    here = {path.name for path in (*inside, *torch_libraries.iterdir())} | set(SYSTEM)
    wanted = sorted({name for path in inside for name in needed(path)} - here)
    missing = set().union(*(symbols(path, "--undefined-only") for path in inside))
    for path in (*inside, *torch_libraries.glob("*.so*"), *map(system_library, SYSTEM)):
        missing -= symbols(path, "--defined-only")
    source = folder / "stubs.c"
    source.write_text("\n".join(definitions(sorted(missing))) + "\n")
    first, *others = wanted
    made = [_compile(source, folder / first)]
    empty = folder / "empty.c"
    empty.write_text("")
    return made + [_compile(empty, folder / name, f"-L{folder}", f"-l:{first}") for name in others]


def needed(path: Path) -> Iterator[str]:
    """Names of the libraries that a binary asks its loader for."""
    for line in _lines("readelf", "-d", path):
        if "(NEEDED)" in line:
            yield line.split("[")[1].split("]")[0]


def symbols(path: Path, which: str) -> set[str]:
    """Symbols of a library, without versions; weak ones that it can do without are not among the undefined."""
    rows = [line.split() for line in _lines("nm", "-D", which, path)]
    return {row[-1].split("@")[0] for row in rows if row and row[-2] not in ("w", "v")} - {""}


def system_library(name: str) -> Path:
    """Where the compiler finds a library of the system."""
    return Path(_lines("gcc", f"-print-file-name={name}")[0])


def definitions(missing: Iterable[str]) -> Iterator[str]:
    """C source that defines symbols, in the order of their names."""
    for number, name in enumerate(missing):
        if name.startswith(_OTHERS):
            continue
        if name in ANSWERS:
            kind, answer = ANSWERS[name]
            yield f"{kind}{name}(void) {{ return {answer}; }}"
        elif name.startswith(_DATA):
            yield f'void *data{number}[{_WORDS}] __asm__("{name}");'
        else:
            yield f'long call{number}(void) __asm__("{name}"); long call{number}(void) {{ return 0; }}'


def _compile(source: Path, library: Path, *options: str) -> Path:
    naming = f"-Wl,-soname,{library.name}"
    _lines(
        "gcc", "-shared", "-fPIC", "-w", "-O1", "-o", library, source, naming, "-Wl,--no-as-needed", *options
    )
    return library


def _lines(*command: str | Path) -> list[str]:
    return subprocess.run(
        list(map(str, command)), check=True, capture_output=True, text=True
    ).stdout.splitlines()
