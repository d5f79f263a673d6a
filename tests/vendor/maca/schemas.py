"""The golden file: what the kernels call of MetaX's packages, transcribed from published sources that it names."""

import re
from pathlib import Path

from tests.architecture.imports import PACKAGE

GOLDEN = Path(__file__).with_name("maca.schemas")
LATER = "later "
"""Before the namespace of a second declaration, which calls have to fit as well."""
_CALLS = (
    (re.compile(r"torch\.ops\.(_C|_C_cache_ops|_moe_C)\.(\w+)\("), "{0}::{1}"),
    (re.compile(r"sdk\.(lmdeploy)_ops\(\)\.(\w+)\("), "mcoplib.{0}::{1}"),
    (re.compile(r"sdk\.(flash_attn|flash_mla)\(\)\.(\w+)\("), "{0}::{1}"),
)


def called() -> set[str]:
    """Names of the vendor's functions that the kernels call, as their sources say."""
    text = "\n".join(path.read_text() for path in sorted((PACKAGE / "vendor" / "maca").rglob("*.py")))
    return {name.format(*found) for call, name in _CALLS for found in call.findall(text)}


def name(schema: str) -> str:
    """``_C::rms_norm`` of a line."""
    return schema.partition("(")[0]


def golden(space: str = "") -> list[str]:
    """The lines of a namespace, or all but those of later versions."""
    lines = [line for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]
    if not space:
        return [line for line in lines if not line.startswith(LATER)]
    return [line for line in lines if line.startswith(f"{space}::")]
