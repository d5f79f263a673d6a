"""docs/reference/faults.md: the faults of LMDeploy that the adaptor corrects, from the records of its patches."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from dlinfer.framework.lmdeploy_ext import faults
from dlinfer.framework.patching import patches_of
from docs.generate.text import cell, page, plain, table

NAME = "faults.md"
BEFORE = """\
For those who compare answers with LMDeploy's own, and for those who move to another release of LMDeploy. On a device
of dlinfer's these faults of LMDeploy are corrected, each in one file of
`dlinfer/framework/lmdeploy_ext/faults`. LMDeploy's own devices keep LMDeploy's code. A release that fixes a fault
makes its file superfluous: `dlinfer contract` shows what changed. "upstream" is the issue or pull request where the
fault is reported."""
HEADS = ("function of LMDeploy", "what it does", "releases", "upstream")


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        yield from _modules(module) if found.ispkg else [module]


def _part(module: ModuleType) -> str:
    """One file: what it corrects, and a row for each function that it replaces."""
    rows = [
        (
            f"`{patch.target.removeprefix('lmdeploy.')}`",
            cell(patch.why),
            f"`{patch.versions}`",
            _upstream(patch.upstream),
        )
        for patch in patches_of(module, "lmdeploy")
    ]
    file = module.__name__.removeprefix(f"{faults.__name__}.").replace(".", "/")
    first = plain((inspect.getdoc(module) or "").partition("\n\n")[0])
    return f"### {file}.py\n\n{first}\n\n{table(HEADS, rows)}" if rows else ""


def _upstream(address: str) -> str:
    """A link to an issue or pull request: "lmdeploy 1548"."""
    if not address:
        return "not reported"
    project, _, number = address.split("/")[-3:]
    return f"[{project} {number}]({address})"


def document() -> str:
    """The page."""
    found = pkgutil.iter_modules(faults.__path__, f"{faults.__name__}.")
    rooms = [importlib.import_module(room.name) for room in found if room.ispkg]
    parts = [
        text
        for room in rooms
        for text in (
            f"## {plain(room.__doc__ or '').rstrip('.')}",
            *(_part(module) for module in _modules(room)),
        )
    ]
    return page("Corrected faults of LMDeploy", BEFORE, *parts)
