"""Read schemas from the text in a package's binaries. Nothing is loaded, so a package of any version can be read."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch

IN_PIECES = frozenset({"atb::_npu_paged_attention_mla"})
"""Ops whose schema is no text of the binaries, because the compiler has split it. The package's header
``AtbOpsInterface.h`` has their parameters."""

_SCHEMA = re.compile(rb"(?<![\x20-\x7e])(?:\w+::)?(\w+)(?:\.\w+)?\([\x20-\x7e]*\) -> [\x20-\x7e]+(?=\0)")


def read(package: Path, ops: Iterable[str]) -> list[str]:
    """Return the schemas of ``ops`` (``npu::npu_rms_norm``), all overloads, except those in ``IN_PIECES``.

    package: a folder with the package's shared objects. Raises OSError if it has none.
    """
    spaces = {op.partition("::")[2]: op.partition("::")[0] for op in ops if op not in IN_PIECES}
    binaries = sorted(package.rglob("*.so"))
    if not binaries:
        raise FileNotFoundError(f"{package} has no shared objects")
    found: set[str] = set()
    for binary in binaries:
        for match in _SCHEMA.finditer(binary.read_bytes()):
            if space := spaces.get(match[1].decode()):
                text = match[0].decode()
                plain = text.split("::", 1)[1] if "::" in text.partition("(")[0] else text
                found.add(str(torch._C.parse_schema(f"{space}::{plain}")))
    return sorted(found)
