"""The matrix of models on vendors' simulated devices: does LMDeploy generate there what transformers do?

``python -m tests.e2e.devices.run [--device NAME ...] [--only FAMILY ...] [--all] [--write-docs]``: the seven families
of the matrix, and latent attention in real sizes, with --all every family of text. Cells that passed with exactly this
code are not run again, so an interrupted run goes on. Exit code 0 only if all pass.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from rich.console import Console

from examples.tiny_models.families import BRIEF, FAMILIES, SIZED
from tests.e2e.devices.cells import CONFIGS, DeviceCell, ask, cells, check
from tests.e2e.devices.table import DEVICES, SimulatedDevice
from tests.e2e.harness import Lab
from tests.e2e.ledger import Ledger, code_fingerprint
from tests.e2e.matrix import MODES
from tests.graph.matrix.ledger import ROOT
from tests.graph.matrix.progress import progress

STATE = ROOT / "build" / "models"
DOCUMENT = ROOT / "docs" / "results" / "models_on_devices.md"
MODE_NAMES = {"graph": "default", "eager": "`eager_mode=True`"}
ASKED = (*FAMILIES, *SIZED)
EVERY = (*ASKED, *BRIEF)
DOCUMENTED = {name: DEVICES[name] for name in ("ascend", "maca", "camb")}
"""Devices of the document, in the order of its columns."""


def failures_of(lab: Lab, cell: DeviceCell) -> list[str]:
    """The failures of a cell, as text."""
    try:
        return check(cell, *ask(lab, cell))
    except AssertionError as error:  # a step or a process broke: the table must show that too
        return [str(error).strip().rpartition("\n")[2]]


def text(entries: Mapping[str, Mapping[str, Any]], asked: Iterable[DeviceCell]) -> str:
    """What came of the cells of one family on one device in one mode; empty where none ran."""
    ran = [entries[cell.name]["failures"] for cell in asked if cell.name in entries]
    failures = [failure for one in ran for failure in one]
    if failures:
        return failures[0].split("\n", 1)[0].replace("|", "/")[:160]
    return "equal" if len(ran) == len(CONFIGS) else ""


def rows(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line of the table for each family that ran anywhere, or is refused."""
    found = []
    for family in EVERY:
        columns = []
        for device in DOCUMENTED.values():
            for mode in MODES:
                refused = device.refused.get(family)
                own = [DeviceCell(device, family, mode, config) for config in CONFIGS]
                columns.append(f"refused: {refused}" if refused else text(entries, own))
        if any(columns):
            found.append(f"| {family} | {' | '.join(columns)} |")
    return found


def references_of(device: SimulatedDevice) -> list[str]:
    """A line for each family and reason for which ops run as their references there."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for (family, op), reason in device.on_references.items():
        grouped.setdefault((family, reason), []).append(f"`{op}`")
    return [
        f"- {device.device_type}, {family}: {', '.join(ops)}, since {reason}."
        for (family, reason), ops in grouped.items()
    ]


def document(entries: Mapping[str, Mapping[str, Any]]) -> str:
    heads = [f"{device}, {MODE_NAMES[mode]}" for device in DOCUMENTED for mode in MODES]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("lmdeploy", "torch", "transformers"))
    listed = [line for device in DOCUMENTED.values() for line in references_of(device)]
    kinds = ", ".join(f"{device.device_type} in {device.dtype}" for device in DOCUMENTED.values())
    table = "\n".join(rows(entries))
    return f"""# Models on simulated devices

For everybody who has an Ascend, MetaX or Cambricon card: which models ran on simulations of them.

Made by `make device-models`; do not edit. {versions}, unmodified, on
devices that are simulated: {kinds}.

A simulation is a torch device on the host's memory. Its ops have the vendor's names and compute in plain torch as the
vendor's documents describe; other calls are refused. It shows that LMDeploy, the adaptor and the vendor's kernels fit
together and call the vendor's ops as documented. It shows nothing about a card's rounding, speed or driver.

Each family is a tiny model with random weights. Prompts of 1 to 140 tokens come in one batch, staggered, one by one,
and in pieces of 32 tokens. *Equal*: the greedy tokens are those of Hugging Face transformers on the CPU with the same
weights in float32. (The weights are such that transformers gives them in float16 too, and that
neither tokens nor experts are nearly tied: `python -m tests.e2e.devices.seeds FAMILY` prints by how much.) Caches and
weights have to lie on the device, and no op but those listed below may be answered by its reference, plain torch on the
device. In the default mode a vendor's default engine would compile the model, but none of these vendors has one.
Decoding steps are captured into the vendor's device graphs, if it has them, and run eagerly otherwise:
[ascend](../vendors/ascend.md), [maca](../vendors/maca.md), [camb](../vendors/camb.md). Empty fields were not tried.

| family | {" | ".join(heads)} |
| --- |{" --- |" * len(heads)}
{table}

{chr(10).join(("On references:", "", *listed)) if listed else "No op runs as its reference in any of them."}
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", nargs="*", choices=list(DEVICES), metavar="NAME")
    parser.add_argument("--only", nargs="*", choices=EVERY, metavar="FAMILY")
    parser.add_argument("--all", action="store_true", help="every family of text, not only these")
    parser.add_argument("--write-docs", action="store_true", help=f"write docs/{DOCUMENT.name}")
    options = parser.parse_args()
    ledger, lab, console = Ledger(STATE / "devices.jsonl"), Lab(STATE), Console(stderr=True)
    asked = cells(options.only or (EVERY if options.all else ASKED))
    chosen = [cell for cell in asked if not options.device or cell.device.device_type in options.device]
    for device in DEVICES.values():
        if reason := device.missing():
            console.print(f"{device.device_type} is not run: {reason}")
            chosen = [cell for cell in chosen if cell.device is not device]
    missing = [cell for cell in chosen if not ledger.passed(cell.name)]
    try:
        with progress("models on devices", len(chosen), len(chosen) - len(missing), console) as advance:
            for cell in missing:
                code, start = code_fingerprint(), time.monotonic()
                failures = failures_of(lab, cell)
                ledger.record(cell.name, code, time.monotonic() - start, failures)
                advance([f"{cell.name}: {'; '.join(failures) or 'equal'}"])
        entries = ledger.entries()
        if options.write_docs:
            DOCUMENT.write_text(document(entries))
    finally:
        lab.close()
    return 1 if any(entries.get(cell.name, {"failures": True})["failures"] for cell in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
