"""The records of releases that people looked over: one file a release, in ``recorded``.

Signatures are compared with the code as it is. A record holds what only a person can judge: the bodies of functions
that we replace or extend, how ops are called, and which BuildSpecs there are.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Record:
    """names: of ours that are imported. calls: op -> its calls' arguments. specs: BuildSpec -> fields. bodies: of
    functions, by ``module:path``, as fingerprints. files: digests of the files that hold patched functions.
    cuda: module -> its mentions of CUDA."""

    version: str
    names: list[str] = field(default_factory=list)
    calls: dict[str, list[str]] = field(default_factory=dict)
    specs: dict[str, list[str]] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    cuda: dict[str, list[str]] = field(default_factory=dict)

    def write(self, folder: Path = FOLDER) -> Path:
        """Write it, and return the file."""
        path = folder / f"{self.version}.json"
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return path


def versions(folder: Path = FOLDER) -> list[str]:
    """The versions that have a record, the oldest first."""
    from packaging.version import Version

    return sorted((path.stem for path in folder.glob("*.json")), key=Version)


def nearest(version: str, folder: Path = FOLDER) -> Record:
    """The record of a version; without one, of the newest version before it, else of the oldest."""
    from packaging.version import Version

    recorded = versions(folder)
    chosen = [each for each in recorded if Version(each) <= Version(version)] or recorded[:1]
    return Record(**json.loads((folder / f"{chosen[-1]}.json").read_text(encoding="utf-8")))
