"""What was seen of a release when the adaptor was last looked over for it: one file a release, beside this one.

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
    cuda: module -> what it says of CUDA."""

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
    """The versions of which there is a record, the oldest first."""
    from packaging.version import Version

    return sorted((path.stem for path in folder.glob("*.json")), key=Version)


def nearest(version: str, folder: Path = FOLDER) -> Record:
    """The record of a version; where there is none, of the newest before it, else of the oldest."""
    from packaging.version import Version

    there = versions(folder)
    before = [one for one in there if Version(one) <= Version(version)]
    chosen = before[-1] if before else there[0]
    return Record(**json.loads((folder / f"{chosen}.json").read_text(encoding="utf-8")))
