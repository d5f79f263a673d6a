"""The table of models: which of LMDeploy's classes generate on the CPU what their oracle does, and which are refused.

``python -m tests.e2e.run_models [--only FAMILY ...] [--write-docs]``. Each family of tiny models meets LMDeploy eagerly
and as graphs (docs/results/models.md says what is asked), each class that is not served the adaptor's refusal.
Cells that passed with exactly this code are not run again, so an interrupted run goes on. Exit code 0 only if all pass.
"""

import argparse
import json
import sys
import time
from importlib import metadata
from typing import Any

from rich.console import Console

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model import support
from dlinfer.framework.lmdeploy_ext.checks.model.support import check_support
from examples.tiny_models.build import BUILT
from examples.tiny_models.families import DIFFUSION, FAMILIES, REWARD
from tests.e2e.cell_checks import check
from tests.e2e.cell_jobs import answers
from tests.e2e.harness import Lab
from tests.e2e.ledger import Ledger, code_fingerprint
from tests.e2e.matrix import BRIEF, MODES, Cell, brief_cells, cells
from tests.framework.lmdeploy_ext.nested import NESTED
from tests.graph.matrix.ledger import ROOT
from tests.graph.matrix.progress import progress

STATE = ROOT / "build" / "models"
VERSION = metadata.version("lmdeploy")
DOCUMENT = ROOT / "docs" / "results" / "models.md"


def asked() -> list[Cell]:
    """One cell of each family in each mode, without further options; and on other engines where the matrix has it."""
    brief = {(cell.family, cell.mode): cell for cell in brief_cells() if cell.config == "base"}
    plain = [
        cell for cell in cells() if cell.family in FAMILIES and cell.seed == 0 and cell.dtype == "float32"
    ]
    return [cell for cell in plain if cell.config == "base"] + list(brief.values())


def run(lab: Lab, cell: Cell) -> list[str]:
    """The failures of a cell, as text."""
    try:
        return check(lab, cell, *answers(lab, {cell: ()})[cell.name])
    except AssertionError as error:  # a step or a process broke: the table must show that too
        return [str(error)]


def class_of(lab: Lab, family: str) -> str:
    """LMDeploy's class of a family, as its checkpoint names it."""
    return json.loads((lab.model(family) / "config.json").read_text())["architectures"][0]


def cell_text(entries: dict[str, dict[str, Any]], found: list[Cell]) -> str:
    """What came of the cells of one family in one column."""
    if not found:
        return ""
    failures = [text for cell in found for text in entries[cell.name]["failures"]]
    return "equal" if not failures else failures[0].split("\n", 1)[0].replace("|", "/")[:120]


def refusal(name: str) -> str | None:
    """Why the adaptor does not serve a class, in its words."""
    part = support.SERVED_VISION.get(name)
    try:
        check_support({"architectures": [name]} | (NESTED.get(name) or ({part: {}} if part else {})))
    except UnsupportedFeatureError as refused:
        told = str(refused.fields["feature"]).removeprefix(f"{name} ").replace(f" ({name})", "")
        return told[1:-1] if told.startswith("(") else told
    return None


def document(lab: Lab, entries: dict[str, dict[str, Any]]) -> str:
    from lmdeploy.pytorch.models.module_map import MODULE_MAP

    served: dict[str, list[str]] = {}
    rows = []
    for family in (*FAMILIES, *BRIEF):
        served.setdefault(class_of(lab, family), []).append(family)
        own = [cell for cell in asked() if cell.family == family]
        columns = [[cell for cell in own if (cell.mode, cell.engine) == (mode, "")] for mode in MODES]
        columns.append([cell for cell in own if cell.engine])
        texts = [cell_text(entries, column) for column in columns]
        rows.append(
            f"| {family} | {class_of(lab, family)} | {BUILT[family].exercises} | {' | '.join(texts)} |"
        )
    for name in support.SERVED_VISION:
        served.setdefault(name, []).append("with images, see [images](../guides/images.md)")
    for families, test in ((REWARD, "test_reward"), (DIFFUSION, "test_block_diffusion")):
        for family in families:
            served.setdefault(class_of(lab, family), []).append(f"{family} (`tests/e2e/{test}.py`)")
    classes = []
    for name in sorted(MODULE_MAP):
        said = refusal(name)
        told = f"refused: {said}" if said else f"served: {', '.join(served.get(name, ['not tested']))}"
        classes.append(f"| {name} | {told} |")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("lmdeploy", "torch", "transformers"))
    families, every = "\n".join(rows), "\n".join(classes)
    return f"""# Models

For everybody who serves with LMDeploy on a CPU: which models are served, and how they were tested.

Made by `make models`; do not edit. {versions}, unmodified, on device `cpu`.

Each family is a tiny model with random weights. Its prompts (1 to 600 tokens) come in one batch, one after another and
staggered. *Equal*: its greedy tokens in float32 are those of Hugging Face transformers in a process of its own. An
empty field was not tried. `make test-full` adds seeds, block sizes, prompts in chunks, prefix caching and bfloat16.
The last bits of logits depend on what shares a forward, because its number of rows decides which kernel is used. In 16
bits a tie of the two best may fall either way. Where frequencies depend on the length (dynamic, longrope), blocks of
the prefix cache are shared only by texts below the original length. When a Phi-3 text outgrows it, its cache is
computed anew, as transformers does, in one prefill: `max_prefill_token_num` is raised to that length plus one where it
is lower, with a warning. So is Phi-3.5-MoE's. Beyond that length it has longrope's long factors, as its authors' code
and transformers 4 give them. transformers 5 ignores the factors that it chose, so the oracle corrects that
(`examples/hf_reference.py`).

| family | class | what it exercises | graph | eager | graph (openvino) |
| --- | --- | --- | --- | --- | --- |
{families}

Other pages: [images](../guides/images.md), [weights of few bits](../guides/quantise.md), [quantised
caches](../guides/kv_cache.md), [LoRA adapters](../guides/adapters.md), [drafts](../guides/drafts.md).

## All classes that LMDeploy knows

| class | what becomes of it |
| --- | --- |
{every}
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=[*FAMILIES, *BRIEF], metavar="FAMILY")
    parser.add_argument("--write-docs", action="store_true", help="write docs/results/models.md")
    options = parser.parse_args()
    ledger, lab, console = Ledger(STATE / f"lmdeploy-{VERSION}.jsonl"), Lab(STATE), Console(stderr=True)
    chosen = [cell for cell in asked() if not options.only or cell.family in options.only]
    missing = [cell for cell in chosen if not ledger.passed(cell.name)]
    try:
        with progress("models", len(chosen), len(chosen) - len(missing), console) as advance:
            for cell in missing:
                code, start = code_fingerprint(), time.monotonic()
                failures = run(lab, cell)
                ledger.record(cell.name, code, time.monotonic() - start, failures)
                advance([f"{cell.name}: {'; '.join(failures) or 'equal'}"])
        entries = ledger.entries()
        if options.write_docs and all(cell.name in entries for cell in asked()):
            DOCUMENT.write_text(document(lab, entries))
    finally:
        lab.close()
    return 1 if any(entries[cell.name]["failures"] for cell in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
