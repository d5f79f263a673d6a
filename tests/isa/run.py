"""The selected tests under each ISA level: ``python -m tests.isa.run [--level NAME] [--only TEST] [--again]``.

For each level it says whether the level is in force, what shows it, and which self-tests fail under it: what
is refused for that is not tested. The CPU's own instructions run a level ("native"), or software does ("model"), under
which the C++ kernels' tests are run and no others; or it is not run, with the flags that this CPU lacks.
Levels that passed for exactly these sources and tests are not run again. Exit status 0 where no level that is available
failed.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from dlinfer.graph.cache.fingerprint import cpu_flags, cpu_model
from tests.isa.levels import LEVELS, Level

ROOT = Path(__file__).parents[2]
STATE = ROOT / "build" / "isa"
SELECTED = Path(__file__).with_name("selected.txt")
KERNELS = "tests/vendor/cpu/"
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)")
_REFUSED = re.compile(r"SKIPPED .*?: (\S.* on this CPU gets .*)")
_ISA = re.compile(r"info,cpu,isa:(.*)")


def selected(level: Level | None = None) -> list[str]:
    """pytest's arguments; of a model the tests of the C++ kernels, which alone it concerns."""
    lines = [line for line in SELECTED.read_text().splitlines() if line.strip() and not line.startswith("#")]
    named = (sorted(ROOT.glob(line)) if "*" in line else [ROOT / line] for line in lines)
    tests = [str(path.relative_to(ROOT)) for paths in named for path in paths]
    return [test for test in tests if test.startswith(KERNELS)] if level and level.is_model else tests


def sources() -> str:
    """A hash of what results depend on: dlinfer, the tests, the CPU."""
    digest = hashlib.sha256(f"{cpu_model()}\n{cpu_flags()}".encode())
    for folder in ("dlinfer", "tests"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in (".py", ".cpp", ".h", ".txt"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def environment(level: Level | None) -> dict[str, str]:
    """This process's, with one level forced and no other."""
    names = {one.variable for one in LEVELS}
    found = {name: value for name, value in os.environ.items() if name not in names}
    return found | ({level.variable: level.value} if level else {}) | {"OMP_WAIT_POLICY": "passive"}


def probed(level: Level | None) -> dict[str, Any]:
    """What the libraries say of themselves under a level."""
    command = [sys.executable, "-m", "tests.isa.probe"]
    given = environment(level) | {"ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    names = {"oneDNN": ", ".join(sorted(set(_ISA.findall(done.stdout))))}
    return names | json.loads(done.stdout.strip().splitlines()[-1])


def in_force(level: Level, free: dict[str, Any], forced: dict[str, Any]) -> str:
    """What shows that a level is in force."""
    shown = {
        "ONEDNN_MAX_CPU_ISA": ("oneDNN", "openvino"),
        "ATEN_CPU_CAPABILITY": ("aten",),
        "DLINFER_CPU_ISA": ("ours",),
    }
    keys = shown[level.variable]
    text = "; ".join(f"{key}: {forced.get(key) or 'not there'}" for key in keys)
    same = all(free.get(key) == forced.get(key) for key in keys)
    return f"{text}{' (as without it: the CPU has no more)' if same else ''}"


def run(level: Level, tests: list[str]) -> dict[str, Any]:
    """The tests' counts under a level, and the last lines of their output where they failed."""
    # Compiled before pytest, whose limit of time a test's first call would meet.
    code = "from dlinfer.vendor.cpu import native; native.load()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(level), check=True)
    # Of a model nothing is looked at but what its kernels compute.
    fewer = (
        ["-k", "not TestCache and not TestReasons and not lesser_instruction_sets"] if level.is_model else []
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *fewer, *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(level), capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    counts = {what: int(number) for number, what in _COUNT.findall(lines[-1] if lines else "")}
    tail = [] if done.returncode == 0 else [*lines[-40:], *done.stderr.strip().splitlines()[-10:]]
    refused = sorted({found.group(1) for line in lines if (found := _REFUSED.match(line))})
    return {"status": done.returncode, "counts": counts, "refused": refused, "tail": tail}


def main() -> int:
    """Run what is to be run; print a line for each level, and the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--level", action="append", metavar="VARIABLE=VALUE", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--only", action="append", metavar="TEST", help="in place of the selected; may be repeated"
    )
    parser.add_argument("--again", action="store_true", help="run levels that passed before too")
    chosen = parser.parse_args()
    STATE.mkdir(parents=True, exist_ok=True)
    code, free = sources(), probed(None)
    print(f"CPU met: {cpu_model()}\nwithout a forced level: {free}", flush=True)
    rows = [
        _row(level, chosen.only or selected(level), code, free, chosen.again)
        for level in LEVELS
        if chosen.level in (None, []) or level.name in chosen.level
    ]
    print(f"\nCPU met: {cpu_model()}")
    width = max((len(name) for name, _, _, _ in rows), default=0)
    for name, how, verdict, detail in rows:
        print(f"{name:{width}}  {how:8}{verdict:8}{detail}")
    return int(any(verdict == "FAILED" for _, _, verdict, _ in rows))


def _row(
    level: Level, tests: list[str], code: str, free: dict[str, Any], again: bool
) -> tuple[str, str, str, str]:
    """A level's name, whether it runs natively, as a model or not, the verdict, and what shows it."""
    here = cpu_flags().split()
    lacking = [flag for flag in level.needs if flag not in here]
    if lacking:
        print(f"{level.name}: not run: this CPU lacks {', '.join(lacking)}", flush=True)
        return level.name, "not run", "", f"this CPU lacks {', '.join(lacking)}"
    how = "model" if level.is_model else "native"
    path = STATE / f"{level.name}-{hashlib.sha256(repr(tests).encode()).hexdigest()[:8]}.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    code = f"{code} {tests}"
    if again or known.get("code") != code or known.get("status") != 0:
        known = run(level, tests) | {"code": code, "in_force": in_force(level, free, probed(level))}
        path.write_text(json.dumps(known))
    tallied: dict[str, int] = known["counts"]
    counts = ", ".join(f"{number} {what}" for what, number in tallied.items())
    verdict = "passed" if known["status"] == 0 else "FAILED"
    print(
        "\n".join(
            [
                f"{level.name}: {how}: {verdict}: {counts} [{known['in_force']}]",
                *known["refused"],
                *known["tail"],
            ]
        ),
        flush=True,
    )
    return level.name, how, verdict, f"{counts} [{known['in_force']}]"


if __name__ == "__main__":
    sys.exit(main())
