"""Finds patched LMDeploy functions whose body differs from the reviewed one. Runs whenever a device is activated."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dlinfer.errors import FrameworkSourceError
from dlinfer.framework.lmdeploy_ext.contract import records
from dlinfer.framework.patching import Patch


def installed_source() -> Path:
    """Return the folder of the installed LMDeploy, without importing it.

    Raises FrameworkSourceError if LMDeploy is not installed.
    """
    loaded = sys.modules.get("lmdeploy")
    spec = importlib.util.find_spec("lmdeploy") if loaded is None else loaded.__spec__
    if spec is None or spec.origin is None:
        raise FrameworkSourceError(folder="the environment", detail="lmdeploy is not installed here")
    return Path(spec.origin).parent


def digest(file: Path) -> str:
    """Return the first 16 hexadecimal digits of a file's SHA-256; an empty text if the file does not exist."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def changed(
    patches: Iterable[Patch],
    version: str,
    source: Callable[[], Path] = installed_source,
    recorded: Path = records.FOLDER,
) -> Iterator[tuple[Patch, str]]:
    """Yield (patch, version of the record) for each patch whose original function differs from the recorded body.

    version: LMDeploy's version, which chooses the record. source: a function that returns LMDeploy's folder.
    recorded: the folder of records. A file whose digest equals the recorded digest is not parsed, so checking a
    reviewed release takes milliseconds.
    """
    record, root = records.nearest(version, recorded), source()
    others = {file for file, known in record.files.items() if digest(root / file) != known}
    if not others:
        return
    from dlinfer.framework.lmdeploy_ext.contract.signatures import fingerprint
    from dlinfer.framework.lmdeploy_ext.contract.source import Tree

    tree = Tree(root)
    for patch in patches:
        original = tree.find(patch.target.replace(":", "."))
        if original is None or str(original.module.path.relative_to(root)) not in others:
            continue
        if patch.target in record.bodies and fingerprint(original.node) != record.bodies[patch.target]:
            yield patch, record.version
