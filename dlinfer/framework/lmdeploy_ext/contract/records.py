"""Reads and writes the records of reviewed LMDeploy releases: one file for each release, in the folder ``recorded``.

A record holds the things that a person has reviewed: the bodies of functions that we replace or extend, the arguments
of op calls, and the BuildSpecs. It holds no signatures of LMDeploy's functions, because the comparison checks those
against our code.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Record:
    """One reviewed LMDeploy release.

    names: ``dlinfer`` names that LMDeploy imports.
    calls: op name -> texts of the arguments in LMDeploy's calls.
    specs: BuildSpec name -> field names.
    bodies: function as ``module:path`` -> fingerprint.
    files: file with patched functions -> digest of the file.
    cuda: module name -> mentions of CUDA in that module.
    """

    version: str
    names: list[str] = field(default_factory=list)
    calls: dict[str, list[str]] = field(default_factory=dict)
    specs: dict[str, list[str]] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    cuda: dict[str, list[str]] = field(default_factory=dict)

    def write(self, folder: Path = FOLDER) -> Path:
        path = folder / f"{self.version}.json"
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return path


def versions(folder: Path = FOLDER) -> list[str]:
    """Return the LMDeploy versions that have a record, oldest first."""
    from packaging.version import Version

    return sorted((path.stem for path in folder.glob("*.json")), key=Version)


def nearest(version: str, folder: Path = FOLDER) -> Record:
    """Return the record of ``version``, else of the nearest older version with a record, else the oldest record."""
    from packaging.version import Version

    recorded = versions(folder)
    chosen = [each for each in recorded if Version(each) <= Version(version)] or recorded[:1]
    return Record(**json.loads((folder / f"{chosen[-1]}.json").read_text(encoding="utf-8")))
