"""The cpu vendor's C++ kernels (csrc/): the wheel's library, or one that is compiled at first use and cached.

A compiler on the user's machine can use every instruction of the CPU; a wheel has kernels for a few levels of
instructions (``prebuilt.py``). The library uses torch's stable ABI and links no Python and no OpenMP, so one compiler
call builds it, in one or two minutes.
"""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from dlinfer import settings
from dlinfer.errors import DlinferError
from dlinfer.graph.torch_private import inductor
from dlinfer.vendor.cpu import isa, prebuilt
from dlinfer.vendor.cpu.compiler import BuildError, compiler
from dlinfer.vendor.cpu.host.threads import fit_threads

SOURCES = Path(__file__).with_name("csrc")
# torch.utils.cpp_extension knows this folder too, but importing it may need setuptools.
TORCH = Path(torch.__file__).parent
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-w")
COMPILE_TIMEOUT = 900  # seconds: it takes one or two minutes, several times as long on a loaded machine
LEAST_POOLED = 128 << 10  # bytes, as kLeastPooled in csrc; the C library itself keeps smaller memory
_SEAL = hashlib.sha256().digest_size

_lock = threading.Lock()
_outcome: str | None = None  # "" once loaded, else why not; None before the first try


def why_not(folder: Path | None = None) -> str | None:
    """Load the kernels. Return a reason if they cannot be loaded; else None.

    Only the first call of a process loads them (see ``load``); later calls return the same result."""
    load(folder)
    return _outcome or None


def library_name() -> str:
    """Return the file name of the library, built or not. The name follows from sources, compiler and instructions.

    Empty if there is no compiler. Raises SettingError if DLINFER_CPU_ISA names instructions that this CPU lacks.
    """
    ready = _ready()
    if ready is not None:
        return ready.name
    try:
        command = _command()
        return _names.get(tuple(command)) or _name(command)
    except (BuildError, ValueError):  # ValueError: CXX cannot be read
        return ""


_names: dict[tuple[str, ...], str] = {}  # cached, since running a compiler takes time


def _name(command: Sequence[str]) -> str:
    _names[tuple(command)] = f"dlinfer_cpu-{_fingerprint(command)}.so"
    return _names[tuple(command)]


def load(folder: Path | None = None) -> None:
    """Make ``torch.ops.dlinfer_cpu`` available. If that fails, ``why_not`` says why.

    folder: the folder of compiled libraries; by default ``native`` in dlinfer's cache folder.

    Only the first call does anything. It may compile for a minute or two, and says so on stderr. It also lowers torch's
    number of threads to those that can run at once (``host/threads.py``). It raises only for a wrong setting of
    dlinfer. Several threads may call it at once, and so may processes that share the folder.
    """
    global _outcome
    if _outcome is not None:
        return
    with _lock:
        if _outcome is not None:
            return
        fit_threads()
        try:
            _build_and_load(_default_folder() if folder is None else folder)
            _register_fakes()
        except DlinferError:
            raise
        except BuildError as error:
            _outcome = str(error)
        except Exception as error:  # noqa: BLE001 - whatever the machine has against it is the answer to why_not
            _outcome = f"{type(error).__name__}: {error}"
        else:
            _outcome = ""


def _default_folder() -> Path:
    from dlinfer.settings import cache_folder

    try:
        return cache_folder() / "native"
    except RuntimeError as error:
        raise BuildError(f"there is no cache folder ({error}); set DLINFER_CACHE_DIR") from error


@contextmanager
def memory_for_results() -> Iterator[None]:
    """Compile or load inductor's loops in this context: they will take large results from the library's memory pool.

    Without the pool, the C library would return large memory to the system and get it again page by page. That takes up
    to a fifth of a prefill's time (csrc/common/result_memory.h). Does nothing if the library is not loaded."""
    if why_not() is not None:
        yield
        return
    with inductor.results_from(torch.ops.dlinfer_cpu.empty_strided.default, LEAST_POOLED):
        yield


# --- building


def build(folder: Path, flags: Sequence[str] = ()) -> Path:
    """Return the path of a sound library: the wheel's, or one in ``folder``, which is compiled now if it is missing.

    flags: more compiler flags, behind FLAGS and those of DLINFER_CPU_ISA. With flags the wheel's library is not used.
    Raises BuildError if the library cannot be built. Raises SettingError if DLINFER_CPU_ISA names instructions that
    this CPU lacks."""
    ready = None if flags else _ready()
    if ready is not None and _is_sound(ready):
        return ready
    return _compiled(folder, flags)


def _ready() -> Path | None:
    """Return the path of the wheel's library for this CPU and torch; None if there is none."""
    return prebuilt.library(_digest()) if prebuilt.FOLDER.is_dir() else None


def _compiled(folder: Path, flags: Sequence[str] = ()) -> Path:
    command = _command(flags)
    path = folder / _name(command)
    try:
        if _is_sound(path):  # the folder may be read-only
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _one_process_at_a_time(path.with_suffix(".lock")):
            if not _is_sound(path):
                _compile(command, path)
    except OSError as error:
        raise BuildError(f"the cache folder {folder} cannot be used: {error.strerror or error}") from error
    return path


def _command(flags: Sequence[str] = ()) -> list[str]:
    return [*compiler(), *FLAGS, *isa.flags(), *flags]


def _fingerprint(command: Sequence[str]) -> str:
    """Hash all that the library depends on: torch, the compiler command and its macros, and the sources.

    The macros show the compiler's version and, with -march=native, the CPU.
    """
    macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
    digest = hashlib.sha256("\0".join([torch.__version__, *command, macros]).encode())
    digest.update(_digest())
    return digest.hexdigest()[:32]


def _digest() -> bytes:
    digest = hashlib.sha256()
    for source in _sources("*.[ch]*"):
        digest.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.digest()


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.rglob(pattern))


@contextmanager
def _one_process_at_a_time(path: Path) -> Iterator[None]:
    """Let one process compile while the others wait. The kernel frees the lock when the process that holds it dies."""
    with path.open("w") as file:
        with suppress(OSError):  # a file system without locks: both compile, and the later rename wins
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say("waiting for another process that compiles the CPU kernels")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"dlinfer: {text}", file=sys.stderr, flush=True)


def _compile(command: Sequence[str], path: Path) -> None:
    _say(f"compiling the CPU kernels for this machine, once, into {path}; it takes one or two minutes")
    # One translation unit for all sources: reading the headers is most of the time.
    unit = "".join(f'#include "{source}"\n' for source in _sources("*.cpp"))
    with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as scratch:
        library = Path(scratch) / "library.so"
        torch_parts = [f"-isystem{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([*command, f"-I{SOURCES}", "-x", "c++", "-", "-o", str(library), *torch_parts], unit)
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        library.replace(path)


def _run(command: Sequence[str], text: str = "") -> str:
    environment = os.environ | {"LC_ALL": "C"}  # English errors, for _first_error
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=COMPILE_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise BuildError(
            f"{command[0]} failed: {_first_error(done.stderr) or f'exit status {done.returncode}'}"
        )
    return done.stdout


def _first_error(output: str) -> str:
    """Return the first line of a compiler's output that names an error; its last lines are often only a summary."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    full = next((line for line in lines if os.strerror(errno.ENOSPC) in line), None)
    if full is not None:
        return (
            f"the disk is full ({full}); free disk space, or set DLINFER_CACHE_DIR and TMPDIR to folders on another "
            "disk"
        )
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")


def _is_sound(path: Path) -> bool:
    """Return whether the file is as it was compiled. A damaged library might load, but crash or compute wrong results.

    The checksum stands behind the library's last section, where loaders do not read it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return len(content) > _SEAL and hashlib.sha256(content[:-_SEAL]).digest() == content[-_SEAL:]


def make_prebuilt(folder: Path) -> list[Path]:
    """Compile the library of every level in a wheel into a folder. Raises BuildError."""
    portable = [flag for flag in FLAGS if not flag.startswith("-march=")]

    def make(flags: tuple[str, ...], path: Path) -> None:
        _compile([*compiler(), *portable, *flags], path)

    return prebuilt.make(folder, _digest(), make)


# --- loading


def _build_and_load(folder: Path) -> None:
    path = build(folder)
    try:
        _load_library(path)
    except BuildError:
        # Made on a machine of the same name with other system libraries (a shared home, a container).
        if path.parent != prebuilt.FOLDER:
            path.unlink(missing_ok=True)
        _load_library(_compiled(folder))


def _load_library(path: Path) -> None:
    try:
        torch.ops.load_library(str(path))
    except OSError as error:  # torch's error; its cause is the loader's
        raise BuildError(f"the compiled library cannot be loaded: {error.__cause__ or error}") from error
    torch.ops.dlinfer_cpu.set_batch_invariant.default(settings.current().cpu_batch_invariant)


def _register_fakes() -> None:
    """Register a fake implementation for each kernel. A key of ``fakes`` lists the kernels that share one function."""

    def like_first(x: Tensor, *rest: object) -> Tensor:
        return x.new_empty(x.shape)

    def like_two(x: Tensor, y: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), y.new_empty(y.shape)

    def rows(x: Tensor, columns: int) -> Tensor:
        return x.new_empty((*x.shape[:-1], columns))

    def gating(logits: Tensor, topk: int, n_groups: int) -> tuple[Tensor, Tensor]:
        chosen = rows(logits, topk)
        return chosen.float(), chosen.long()

    fakes: dict[str, Callable[..., object]] = {
        "rms_norm silu_mul gelu_mul gated_sum fused_moe fused_moe_bf12 fused_moe_clamped": like_first,
        "add_rms_norm apply_rotary_pos_emb": like_two,
        "linear": lambda x, weight, *rest: rows(x, weight.shape[0]),
        "linears": lambda x, weights, *rest: [rows(x, weight.shape[0]) for weight in weights],
        "linear_silu_and_mul": lambda x, weight, *rest: rows(x, weight.shape[0] // 2),
        "silu_and_mul": lambda x: rows(x, x.shape[-1] // 2),
        "linear_bf12": lambda x, weight, bias, out_features: rows(x, out_features),
        "linear_bf12_silu_and_mul": lambda x, weight, bias, out_features: rows(x, out_features // 2),
        "linear_gguf": lambda x, weight, bias, types, count: rows(x, sum(count)),
        "embedding_gguf": lambda indices, weight, kind, count, columns, dtype: weight.new_empty(
            (*indices.shape, columns), dtype=dtype
        ),
        "weight_quant_matmul weight_quant_matmul_int8 mxfp4_matmul": lambda x, qweight, scales, *rest: rows(
            x, scales.shape[1]
        ),
        "embedding": lambda table, indices, *rest: table.new_empty((*indices.shape, table.shape[1])),
        "embedding_bf12": lambda indices, weight, count, columns: weight.new_empty(
            (*indices.shape, columns), dtype=torch.bfloat16
        ),
        "moe_gating_topk_softmax": gating,
        "largest_tokens drawn_tokens": lambda logits, *rest: logits.new_empty(
            logits.shape[:1], dtype=torch.int64
        ),
        "fill_kv_cache all_reduce": lambda *rest: None,
    }
    for names, fake in fakes.items():
        for name in names.split():
            torch.library.register_fake(f"dlinfer_cpu::{name}", fake)
