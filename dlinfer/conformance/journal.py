"""The journal: a file of the results so far. It lets a run that was interrupted continue where it stopped.

The first line has a key: a hash of the request, the versions and the source. Each other line has one result. A run
with another key ignores and overwrites the results.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dlinfer
from dlinfer import settings
from dlinfer.conformance.result import Header, Result
from dlinfer.vendor.base import Vendor

_SOURCE = {".py", ".cpp", ".h", ".so", ".schemas", ".signatures"}


def key_of(request: dict[str, Any], header: Header, vendor: Vendor) -> str:
    """Return a hash of all that results depend on: the request, the versions, and the code of dlinfer and vendor."""
    asked = {name: request[name] for name in ("vendor", "ops", "checks", "thorough")}
    current = settings.current()
    digest = hashlib.sha256(json.dumps([asked, asdict(header), str(current.engine)]).encode())
    own = Path(str(dlinfer.__file__)).parent
    module = getattr(vendor.probe, "__module__", "")
    for folder in (own, *_outside(module, own)):
        for file in sorted(folder.rglob("*")):
            place = file.relative_to(folder)
            matters = folder is not own or _matters(place.as_posix(), module)
            if file.suffix in _SOURCE and matters and file.is_file():
                digest.update(str(place).encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _matters(place: str, module: str) -> bool:
    """Return whether a change to dlinfer's file ``place`` can change the results of the vendor in ``module``.

    Files of framework adaptors, of the command line and of other vendors have no influence. Files of the CPU vendor and
    of the reference always have one.
    """
    top, _, rest = place.partition("/")
    if top in ("framework", "cli"):
        return False
    folder, inside, _ = rest.partition("/")
    its_own = module.startswith(f"dlinfer.vendor.{folder}") or folder in ("cpu", "reference")
    return top != "vendor" or not inside or its_own


def _outside(module: str, own: Path) -> Iterator[Path]:
    """Yield the folder of the vendor's package, or nothing if the vendor is part of dlinfer.

    module: the vendor's module. own: the folder of dlinfer's package.
    """
    top = sys.modules.get(module.partition(".")[0])
    file = Path(getattr(top, "__file__", None) or own / "__init__.py")
    if file.name == "__init__.py" and file.parent != own:
        yield file.parent


def read(path: Path) -> tuple[str, list[Result]]:
    """Return (key, results) of a journal, up to the first line that was cut off."""
    key, results = "", list[Result]()
    try:
        first, *lines = path.read_text().splitlines()
        key = json.loads(first)["key"]
        for line in lines:
            results.append(Result(**json.loads(line)))
    except (OSError, ValueError, KeyError, TypeError):  # not there, cut off, or not a journal
        pass
    return key, results


def begin(path: Path, key: str, results: list[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"key": key}, *map(asdict, results)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def add(path: Path, result: Result) -> None:
    """Append a result. The result is in the file when this function returns."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
