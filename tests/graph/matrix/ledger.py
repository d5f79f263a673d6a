"""The memory of the matrices: what has a result with exactly this code, so that an interrupted run goes on."""

import hashlib
import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
STATE = ROOT / "build" / "graph_matrix"
"""Where the ledgers lie: a folder that git ignores and ``make clean`` removes."""

_CODE = (
    "dlinfer/*.py",
    "dlinfer/graph/**/*.py",
    "dlinfer/ops/**/*.py",
    "dlinfer/vendor/**/*.py",
    "dlinfer/vendor/**/*.cpp",
    "dlinfer/vendor/**/*.h",
    "tests/graph/matrix/*.py",
)
"""What the matrices run: neither adaptors nor the command line."""

ENGINE_CODE = ("vendor/cpu/inductor/", "vendor/cpu/csrc/", "vendor/cpu/native.py")
"""What only runs behind the partition, and so not where capture is tested alone."""

_LIBRARIES = ("torch", "transformers")


def code_fingerprint(root: Path = ROOT, without: tuple[str, ...] = ()) -> str:
    """Hash of dlinfer's and the matrices' source as it lies on disk, and of the libraries' versions.

    without: parts of paths of files that do not count.
    """
    digest = hashlib.sha256()
    for pattern in _CODE:
        for path in sorted(root.glob(pattern)):
            if any(part in path.as_posix() for part in without):
                continue
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    for library in _LIBRARIES:
        digest.update(f"{library} {metadata.version(library)}".encode())
    return digest.hexdigest()[:16]


class Ledger:
    """A file of JSON lines, one a finished item: {"item", "lane", "code", "result"}.

    Only lines of the code as it was when this object was made count, so an interrupted run goes on and an edited
    source starts anew.
    """

    def __init__(self, path: Path, lane: str, without: tuple[str, ...] = ()) -> None:
        self.path = path
        self.lane = lane
        self.code = code_fingerprint(without=without)

    def entries(self) -> dict[str, dict[str, Any]]:
        """The latest result of each item of this lane and code."""
        if not self.path.is_file():
            return {}
        found = {}
        for line in self.path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # a line that was being written when the machine went down
                continue
            if entry["code"] == self.code and entry["lane"] == self.lane:
                found[entry["item"]] = entry["result"]
        return found

    def record(self, item: str, result: dict[str, Any]) -> None:
        """Append one result as one write, so that shards may share a file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"item": item, "lane": self.lane, "code": self.code, "result": result}) + "\n"
        with self.path.open("a") as file:
            file.write(line)


def shard(items: Iterable[str], index: int, count: int) -> list[str]:
    """Every ``count``-th item from ``index``, counted from 1."""
    assert 1 <= index <= count, f"shard {index}/{count}"
    return list(items)[index - 1 :: count]
