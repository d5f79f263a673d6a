"""Is every vendor right? ``dlinfer conformance --thorough`` of each that this machine can run, and the table of them.

``python -m tests.conformance.run_all [--vendor NAME ...] [--write-docs]``. Results lie in build/conformance as they are
found, so an interrupted run goes on; what was found with other source or versions does not count. Exit code 0 only if
every claim of every vendor that was asked holds.

Ascend, MetaX and Cambricon are asked in processes that have a simulated device.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from dlinfer.conformance import plan
from dlinfer.vendor import discovery
from tests.e2e.devices.table import distribution
from tests.vendor.maca.simulated_card import triton_package
from tests.workers import ROOT

STATE = ROOT / "build" / "conformance"
DOCUMENT = ROOT / "docs" / "results" / "conformance.md"
BEGIN, END = "<!-- made by make conformance; do not edit -->", "<!-- end -->"
EAGER = tuple(dict.fromkeys(check.name for check in (*plan.CHECKS, *plan.WHOLE) if check.eager))


@dataclass(frozen=True)
class Asked:
    """A vendor and how its process comes by its device.

    simulation: ``module:function`` that makes the device; empty where the vendor runs on this machine.
    folders: further ones for PYTHONPATH, relative to the tree. checks: of the command; empty for all.
    left_out: why not all. libraries: distributions whose versions its results depend on, besides torch.
    needs_triton: whether its kernels are interpreted.
    """

    vendor: str
    simulation: str = ""
    folders: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    left_out: str = ""
    libraries: tuple[str, ...] = ()
    needs_triton: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    def missing(self) -> str:
        """Why it cannot be asked here; empty where it can."""
        if self.simulation:
            return triton_package.missing() if self.needs_triton else ""
        probe = discovery.get(self.vendor).probe()
        return "" if probe.available else f"{probe.reason}. Next step: {probe.next_step}"

    def environment(self) -> dict[str, str]:
        """Variables of its process."""
        places: list[object] = []
        if self.simulation:
            site = STATE / "sites" / self.vendor
            vendor = f"dlinfer.vendor.{self.vendor}:VENDOR"
            distribution(site, f"simulated-{self.vendor}", self.vendor, self.simulation, vendor)
            places = [site, *(ROOT / folder for folder in self.folders)]
        if self.needs_triton:
            places.append(triton_package.folder())
        path = os.pathsep.join(str(one) for one in (*places, ROOT, os.environ.get("PYTHONPATH")) if one)
        return {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive", **self.variables}

    def proof(self) -> str:
        """How far it is proven at most: of its ops' levels, how many have each."""
        if not self.simulation:
            return "reference itself" if discovery.get(self.vendor).is_reference else "real runtime"
        levels = list((discovery.get(self.vendor).proofs or dict)().values())
        counts = ", ".join(f"{levels.count(one)} {one}" for one in dict.fromkeys(sorted(levels)))
        return f"simulated; ops: {counts}"

    def versions(self) -> str:
        names = ("torch", *self.libraries)
        return ", ".join(f"{name} {metadata.version(name).partition('+')[0]}" for name in names)


VENDORS = {
    one.vendor: one
    for one in (
        Asked("cpu"),
        Asked("reference"),
        Asked("openvino", libraries=("openvino",)),
        Asked("onnxruntime", libraries=("onnxruntime", "onnx", "onnxscript")),
        Asked(
            "ascend",
            "tests.vendor.ascend.simulated_npu.install:install",
            checks=EAGER,
            left_out="`graph`, `dynamic`: the simulated device has no torchair; tests/vendor/ascend/graph has it",
        ),
        Asked(
            "maca",
            "tests.vendor.maca.simulated_card.install:install",
            folders=("tests/vendor/maca/packages",),
            needs_triton=True,
            variables={"TRITON_INTERPRET": "1"},
        ),
        Asked("camb", "tests.vendor.camb.simulated_mlu.install:install"),
        Asked("megengine"),
        Asked("sophgo"),
    )
}
USUAL = ("cpu", "reference", "openvino", "onnxruntime", "ascend", "maca", "camb")
"""Those that are asked where none is named: the others' engines take hours, a process of their own for each graph."""


def files(vendor: str) -> dict[str, Path]:
    """Where the forms of a vendor's report lie."""
    ends = {"json": "json", "junit": "xml", "html": "html"}
    found = {option: STATE / f"{vendor}.{end}" for option, end in ends.items()}
    return {"resume": STATE / f"{vendor}-{_simulation(vendor)}.jsonl", **found}


def _simulation(vendor: str) -> str:
    """Of the simulated device's source, by which its results are kept; "real" where there is none."""
    if not VENDORS[vendor].simulation:
        return "real"
    digest = hashlib.sha256()
    folder = ROOT / "tests" / "vendor" / vendor
    for file in sorted((*folder.glob("simulated_*/*.py"), *folder.glob("packages/**/*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def ask(asked: Asked) -> int:
    """Run the command for a vendor, its output on ours. Gives its exit status."""
    STATE.mkdir(parents=True, exist_ok=True)
    options = [word for check in asked.checks for word in ("--check", check)]
    options += [word for option, file in files(asked.vendor).items() for word in (f"--{option}", str(file))]
    command = [sys.executable, "-m", "dlinfer", "conformance", asked.vendor, "--thorough", *options]
    return subprocess.run(command, cwd=ROOT, env=os.environ | asked.environment(), check=False).returncode


def row(asked: Asked, found: dict[str, Any]) -> str:
    """A vendor's line of the table."""
    counts = found["counts"]
    ran = counts["passed"] + counts["declined"] + counts["failed"]
    numbers = (ran, counts["passed"], counts["declined"], counts["failed"], round(found["seconds"]))
    return f"| {asked.vendor} | {' | '.join(map(str, numbers))} | {asked.proof()} | {asked.versions()} |"


def table(reports: dict[str, dict[str, Any]], skipped: dict[str, str]) -> str:
    """What came of each vendor that was asked, and why the others were not."""
    lines = [row(VENDORS[name], found) for name, found in reports.items()]
    notes = [f"- {name}, left out: {one.left_out}." for name, one in VENDORS.items() if one.left_out]
    notes += [f"- {name} was not asked: {why}." for name, why in skipped.items()]
    head = "| vendor | cases run | passed | declined by claim | failed | seconds | proof | versions |"
    return "\n".join((head, "| --- |" + " --- |" * 7, *lines, "", *notes))


def with_table(document: str, made: str) -> str:
    """The page with a new table between its marks. Raises ValueError where it has none."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(document):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{made}\n\n{END}", document)


def run(names: Iterable[str], write_docs: bool) -> int:
    """Ask each, then print the table and put it into the page where that is wanted."""
    skipped, broken = {}, []
    for name in names:
        if why := VENDORS[name].missing():
            skipped[name] = why
            print(f"skipped {name}: {why}", flush=True)
        elif ask(VENDORS[name]):
            broken.append(name)
    reports = {name: json.loads(files(name)["json"].read_text()) for name in VENDORS if _has_report(name)}
    made = table(reports, skipped)
    print(made)
    if write_docs:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), made))
    return 1 if broken else 0


def _has_report(name: str) -> bool:
    return files(name)["json"].is_file()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vendor", nargs="*", choices=list(VENDORS), default=USUAL, metavar="NAME")
    parser.add_argument(
        "--write-docs", action="store_true", help=f"write the table into docs/{DOCUMENT.name}"
    )
    options = parser.parse_args()
    return run(options.vendor, options.write_docs)


if __name__ == "__main__":
    sys.exit(main())
