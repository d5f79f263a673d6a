"""``dlinfer new-vendor``: write the package of a new vendor, which passes ``dlinfer conformance`` unchanged."""

import argparse
import keyword
import re
import sys
from pathlib import Path

from dlinfer.errors import DlinferError
from dlinfer.vendor import discovery

TEMPLATE = Path(__file__).parent / "template"
SUFFIX = ".in"
PACKAGE = "package"
"""The template's folder that becomes ``dlinfer_<name>``."""

EXIT = "Exit status: 0 if the package was written, 1 if nothing was written."


class NewVendorError(DlinferError, ValueError):
    """A new vendor's package cannot be written."""

    message = "the package of vendor {name!r} cannot be written: {detail}."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="name of the vendor and of its device: lower-case letters and digits"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="folder to create dlinfer-NAME in (default: the current folder)",
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        package = write(arguments.name, arguments.folder)
    except (NewVendorError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"wrote {package}\n")
    sys.stdout.write(f"next: pip install -e {package} && dlinfer conformance {arguments.name}\n")
    return 0


def write(name: str, folder: Path) -> Path:
    """Write the package to ``folder/dlinfer-<name>`` and return its path. Write nothing if NewVendorError is raised."""
    check_name(name)
    package = folder / f"dlinfer-{name}"
    if package.exists():
        raise NewVendorError(name=name, detail=f"{package} exists already")
    for place, text in rendered(name).items():
        file = package / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return package


def rendered(name: str) -> dict[str, str]:
    files = {}
    for file in sorted(TEMPLATE.rglob(f"*{SUFFIX}")):
        place = file.relative_to(TEMPLATE).as_posix().removesuffix(SUFFIX)
        first, slash, rest = place.partition("/")
        if first == PACKAGE:
            place = f"dlinfer_{name}{slash}{rest}"
        files[place] = file.read_text().replace("@NAME@", name)
    return files


def check_name(name: str) -> None:
    """Raise NewVendorError if a name clashes with torch, Python or an installed vendor."""
    if not re.fullmatch(r"[a-z][a-z0-9]{1,30}", name) or keyword.iskeyword(name):
        raise NewVendorError(
            name=name,
            detail=(
                "a name has 2 to 31 lower-case letters and digits, starts with a letter, and is not a Python "
                "keyword"
            ),
        )
    if name in discovery.names():
        raise NewVendorError(name=name, detail="an installed package already provides a vendor of this name")
    import torch

    if hasattr(torch, name):
        raise NewVendorError(name=name, detail=f"a device of this name would hide torch.{name}")
