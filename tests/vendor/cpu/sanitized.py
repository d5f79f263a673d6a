"""The C++ kernels under g++'s sanitizers: ``python -m tests.vendor.cpu.sanitized [TEST ...] [--isa LEVEL ...]``.

Compiles ``csrc`` with AddressSanitizer and UndefinedBehaviorSanitizer into build/sanitize, apart from all other
libraries, and runs the kernels' tests on it: what reads or writes outside of an array, or adds beyond an int's range,
ends the process with the line of the source. The tests of graph mode follow: CXX is the compiler of inductor's loops
too, so that a generated loop which trusts a wrong size is found. Then ThreadSanitizer watches the team of threads in a
program of its own (``threads/race.cpp``): in Python's process it would have to know what happens in torch and OpenMP,
which are not built for it, and report races that are none. Exit status 0 where nothing was found.

Not seen are results of 128 KiB and more, which lie in memory of the library's own (``common/result_memory.h``), and
what one tensor reads of another's part of the same storage. Leaks are not looked for: CPython and torch keep much till
the end. Other tests than those of the kernels measure memory, which the sanitizer itself takes.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.isa import NEEDS, missing
from tests.vendor.cpu.threads.building import RACE, compiled

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "sanitize"
HERE = Path(__file__).parent.relative_to(ROOT)
TESTS = (*(str(path.relative_to(ROOT)) for path in sorted(Path(__file__).parent.glob("test_native*.py"))),
         f"{HERE}/eight_bit/test_native.py")  # fmt: skip
GRAPH_TESTS = ("tests/graph", "tests/runtime", str(HERE / "inductor"))
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
"""Behind those of ``native``: the last -O counts, and with -O3 the compiler takes three times as long."""
FIRST = ("libasan.so", "libstdc++.so.6")
"""Libraries that have to be there before all others."""
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:detect_stack_use_after_return=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}
# Of how libraries are made and kept, which another compiler's flags do not change; they compile for long.
LEFT_OUT = "not TestCache and not lesser_instruction_sets"
# Of memory and time, which the sanitizer itself takes.
LEFT_OUT_OF_GRAPHS = "not resident and not memory_grows and not seconds"


def environment(folder: Path) -> dict[str, str]:
    """This process's, in which the kernels are compiled for the sanitizers, into ``folder``. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = native.compiler()
    script = f'#!/bin/sh\nexec {" ".join(compiler)} "$@" {FLAGS}\n'
    # The name is part of the library's, so it tells the flags.
    wrapper = folder / f"compiler-{hashlib.sha256(script.encode()).hexdigest()[:8]}"
    wrapper.write_text(script)
    wrapper.chmod(0o755)
    # Before Python: the sanitizer has to see all memory, and by libstdc++ where exceptions are thrown.
    first = ":".join(_library(compiler, name) for name in FIRST)
    ours = {
        "CXX": str(wrapper),
        "DLINFER_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "LD_PRELOAD": first,
        "PYTHONPATH": str(ROOT),
        # OpenVINO's TBB else loads libraries in a way that the address sanitizer refuses.
        "TBB_ENABLE_SANITIZERS": "1",
    }
    return os.environ | OPTIONS | {"OMP_WAIT_POLICY": "passive"} | ours


def why_not() -> str:
    """What the compiler here lacks; empty where it has all."""
    try:
        for name in FIRST:
            _library(native.compiler(), name)
    except native.BuildError as error:
        return str(error)
    return ""


def _library(compiler: Sequence[str], name: str) -> str:
    command = [*compiler, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        raise native.BuildError(f"{compiler[0]} has no {name}: g++ with its sanitizers is needed")
    return str(Path(found).resolve())


def run(
    tests: Sequence[str],
    level: str = "",
    sources: Path | None = None,
    folder: Path = FOLDER,
    chosen: str = LEFT_OUT,
) -> int:
    """pytest's exit status, or that of the sanitizer which has ended its process.

    sources: in place of ``csrc``; may lack kernels. level: of DLINFER_CPU_ISA; empty is all that this CPU has. chosen:
    pytest's expression of the tests to run.
    """
    given = environment(folder) | ({"DLINFER_CPU_ISA": level} if level else {})
    given.pop("CI", None)
    before = ""
    if sources:
        before = f"native.SOURCES, native._register_fakes = Path({str(sources)!r}), lambda: None"
    arguments = ["-q", "-n0", "--capture=sys", "-p", "no:cacheprovider", "-k", chosen, *tests]
    # Compiled before pytest, whose limit of time a test's first call would meet.
    code = f"""
import sys
from pathlib import Path
import pytest
from dlinfer.vendor.cpu import native
{before}
assert native.why_not() is None, native.why_not()
assert "libasan" in Path("/proc/self/maps").read_text()
sys.exit(pytest.main({arguments!r}))
"""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=given, check=False).returncode


def races(sources: Path = native.SOURCES) -> int:
    """The exit status of the program of races under ThreadSanitizer; 66 where one was found."""
    with tempfile.TemporaryDirectory(prefix="dlinfer-race-") as folder:
        program = compiled(RACE, Path(folder) / "race", ["-fsanitize=thread"], sources)
        # Some kernels lay memory out in a way that older sanitizers do not expect, but for programs at fixed places.
        fixed = ["setarch", "-R"] if _is_refused(program) else []
        return subprocess.run([*fixed, str(program)], env=os.environ | OPTIONS, check=False).returncode


def _is_refused(program: Path) -> bool:
    done = subprocess.run([str(program), "0"], capture_output=True, text=True, check=False)
    return "unexpected memory mapping" in done.stderr


def main() -> int:
    """Print what is done, and a line for each part at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    here = [level for level in NEEDS if not missing(level)]
    parser.add_argument(
        "--isa", nargs="+", choices=here, default=[""], help="levels, in place of all of this CPU's"
    )
    parser.add_argument("tests", nargs="*", metavar="TEST", help="in place of all tests of the kernels")
    chosen = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    found: dict[str, int] = {}
    for level in chosen.isa:
        name = f"address and undefined{', ' + level if level else ''}"
        start = time.monotonic()
        print(f"== {name}: compiling takes two minutes, the tests some more", flush=True)
        found[name] = run(chosen.tests or TESTS, level)
        print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
    if not chosen.tests:
        start = time.monotonic()
        print("== address and undefined, graphs", flush=True)
        found["address and undefined, graphs"] = run(GRAPH_TESTS, chosen=LEFT_OUT_OF_GRAPHS)
        print(f"== graphs: {time.monotonic() - start:.0f} s", flush=True)
    print("== threads", flush=True)
    found["threads"] = races()
    for name, status in found.items():
        print(f"{name}: {'nothing found' if status == 0 else f'FAILED, exit status {status}'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
