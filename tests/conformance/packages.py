"""Packages as ``dlinfer new-vendor`` writes them, put where Python finds them without pip: files and a dist-info."""

import os
import shutil
import tomllib
from pathlib import Path


def install(package: Path, site: Path) -> None:
    """Lay a package's modules and what pip would write of it into a folder for ``PYTHONPATH``."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    module = project["name"].replace("-", "_")
    shutil.copytree(package / module, site / module)
    info = site / f"{module}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))


def path_with(*folders: Path) -> str:
    """A ``PYTHONPATH`` that begins with these folders."""
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))
