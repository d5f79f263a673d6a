"""Memory of the long lane: which cells passed with exactly this code, so that an interrupted run goes on."""

import hashlib
import json
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from tests.workers import ROOT

CODE = (
    *("dlinfer/**/*.py", "dlinfer/**/*.cpp", "dlinfer/**/*.h", "tests/e2e/**/*.py", "examples/**/*.py"),
    *("tests/vendor/*/simulated_*/*", "tests/vendor/maca/packages/**/*.py"),
)


def code_fingerprint() -> str:
    """Hash of the product's and the checks' source as it lies on disk, and of the libraries' versions."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode())
                digest.update(path.read_bytes())
    for library in ("lmdeploy", "torch", "transformers", "openvino"):
        with suppress(
            metadata.PackageNotFoundError
        ):  # the cells of engines that are not installed are skipped
            digest.update(metadata.version(library).encode())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The commit that is checked out, with "+" where files differ from it; "unknown" outside a repository."""
    told = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or "unknown"


class Ledger:
    """A JSON-lines file, one line a finished cell; only lines of the code as it is now count."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> dict[str, dict]:
        """The latest result of each cell for this code: name -> what ``record`` wrote."""
        if not self.path.is_file():
            return {}
        code = code_fingerprint()
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {entry["cell"]: entry for entry in lines if entry["code"] == code}

    def passed(self, cell: str) -> str:
        """When and at which commit a cell passed with this code; empty where it did not."""
        entry = self.entries().get(cell)
        return "" if entry is None or entry["failures"] else f"{entry['at']} at commit {entry['commit']}"

    def last(self) -> str:
        """When and at which commit any cell ran last, with whatever code; empty where none ever did."""
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        entry = json.loads(lines[-1]) if lines else {}
        return f"{entry['at']} at commit {entry['commit']}" if entry else ""

    def record(self, cell: str, code: str, seconds: float, failures: list[str]) -> None:
        """Note a result that began with ``code``; dropped when the source was edited meanwhile."""
        if code_fingerprint() != code:
            return
        entry = {
            "cell": cell,
            "code": code,
            "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": commit(),
            "seconds": round(seconds, 1),
            "failures": failures,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
