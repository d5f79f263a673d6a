"""The golden file: the vendor's published signatures of the functions that the kernels call, of one version.

python -m tests.vendor.camb.signatures   compares it with the torch_mlu_ops that is installed, on a machine with one
"""

import importlib
import inspect
import re
import sys
import typing
from pathlib import Path

import torch

from tests.architecture.imports import PACKAGE

VERSION = "1.12.1"
GOLDEN = Path(__file__).with_name(f"torch_mlu_ops-{VERSION}.signatures")
WITNESS = GOLDEN.with_name("vllm_mlu-b9925203.calls")
_LATENT = "latent "
_CALL = re.compile(r"\btmo\(\)\.([a-z]\w+)\(")
_NAMES = {"torch": torch} | {
    name: getattr(typing, name) for name in ("Optional", "Union", "Tuple", "List", "Dict")
}


def called() -> set[str]:
    """Names of the vendor's functions that the kernels call, as their sources say."""
    sources = sorted((PACKAGE / "vendor" / "camb").rglob("*.py"))
    return {name for path in sources for name in _CALL.findall(path.read_text())}


def lines() -> dict[str, str]:
    """Function -> its line in the file."""
    text = GOLDEN.read_text().splitlines()
    return {one.partition("(")[0]: one for one in text if one and not one.startswith("#")}


def signature(line: str) -> inspect.Signature:
    """A line as Python understands it."""
    space: dict[str, typing.Any] = dict(_NAMES)
    exec(f"def {line}: ...", space)
    return inspect.signature(space[line.partition("(")[0]])


def witnessed() -> dict[str, tuple[list[str], list[str]]]:
    """Function -> (names by place, names by keyword) of the vendor's own calls of it."""
    found = {}
    for line in WITNESS.read_text().splitlines():
        if line and not line.startswith(("#", _LATENT)):
            name, _, given = line.rstrip(")").partition("(")
            by_place, _, by_keyword = given.partition("; ")
            found[name] = by_place.split(", "), [one for one in by_keyword.split(", ") if one]
    return found


def of_latent_caches() -> dict[str, dict[str, str]]:
    """Function -> argument -> what the vendor's own calls give there of a latent cache, as its sources spell it."""
    found = {}
    for line in WITNESS.read_text().splitlines():
        if line.startswith(_LATENT):
            name, _, given = line.removeprefix(_LATENT).rstrip(")").partition("(")
            pairs = (one.partition("=") for one in given.split(", "))
            found[name] = {argument: value for argument, _, value in pairs}
    return found


def drift(module: typing.Any) -> list[str]:
    """What a module has otherwise: names, order and defaults of arguments, since annotations vary in spelling."""
    found = []
    for name, line in lines().items():
        function = getattr(module, name, None)
        if function is None:
            found.append(f"{name}: is not there")
            continue
        given, wanted = (
            [(one.name, one.default) for one in side.parameters.values()]
            for side in (inspect.signature(function), signature(line))
        )
        if given != wanted:
            found.append(f"{name}: {[one for one in given if one not in wanted] or given} differ")
    return found


def main() -> int:
    importlib.import_module("torch_mlu")
    found = drift(importlib.import_module("torch_mlu_ops"))
    print("\n".join(found) or f"as in {GOLDEN.name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
