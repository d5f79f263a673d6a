"""The golden file: the schemas of the vendor's ops that the kernels call, of one version of torch_npu.

python -m tests.vendor.ascend.schemas   writes it anew from the vendor's package (make torch-npu)
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tests.architecture.imports import PACKAGE
from tests.vendor.ascend.vendor_package import environment

GOLDEN = Path(__file__).with_name(f"torch_npu-{environment.VERSION}.schemas")
_CALL = re.compile(r"torch\.ops\.(npu|atb)\.([a-z]\w+|_\w+)\(")


def called() -> set[str]:
    """Names of the vendor's ops that the kernels call, as their sources say.

    Those of graphs are asked of the vendor's package itself (``graph/``).
    """
    folder = PACKAGE / "vendor" / "ascend"
    sources = sorted(set(folder.rglob("*.py")) - set((folder / "graph").rglob("*.py")))
    return {f"{space}::{op}" for path in sources for space, op in _CALL.findall(path.read_text())}


def name(schema: str) -> str:
    """``npu::npu_linear`` of a schema's text, without its overload."""
    return schema.partition("(")[0].partition(".")[0]


def chosen(schemas: Iterable[str]) -> list[str]:
    """Of all schemas, those of the ops that are called: all their overloads, since torch chooses among them."""
    wanted = called()
    return sorted(one for one in schemas if name(one) in wanted)


def golden() -> list[str]:
    """The schemas in the file."""
    return [line for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]


def write() -> None:
    """Write the file from the vendor's package."""
    head = f"# Schemas of torch_npu {environment.VERSION}, as its binaries register them: python -m {__spec__.name}\n"
    GOLDEN.write_text(head + "\n".join(chosen(environment.read_schemas())) + "\n")


if __name__ == "__main__":
    write()
