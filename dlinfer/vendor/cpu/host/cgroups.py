"""The cgroups of this process for one controller, in both interfaces (v1 and v2).

An ancestor's limit holds for this process too, so a hierarchy lists all ancestors. The kernel documents the files in
Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple


class Hierarchy(NamedTuple):
    """The folders of this process's cgroup and its ancestors, nearest first."""

    version: Literal["v1", "v2"]
    folders: tuple[Path, ...]


def hierarchies(controller: str, root: Path = Path("/")) -> Iterator[Hierarchy]:
    """Yield the hierarchies that may limit this process for a controller, such as ``memory``.

    root: the folder with ``proc`` and ``sys``; only tests pass another.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = list(_mounts(root))
    except OSError:  # not Linux, or no /proc
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version, filesystem = "v2", "cgroup2"
        elif controller in controllers.split(","):
            version, filesystem = "v1", "cgroup"
        else:
            continue
        for mount in mounts:
            if mount.filesystem != filesystem or (version == "v1" and controller not in mount.options):
                continue
            # A container may see the host's path in /proc/self/cgroup, while only a part of the hierarchy is mounted.
            # The mount point is the nearest folder of a path outside that part.
            inside = os.path.relpath(path, mount.mounted)
            visible = not inside.startswith("..") and not path.startswith("/..")
            folder = mount.point / inside if visible else mount.point
            folder = folder if folder.is_dir() else mount.point
            levels = (folder, *folder.parents)
            yield Hierarchy(version, levels[: levels.index(mount.point) + 1])


class _Mount(NamedTuple):
    """One mount of /proc/self/mountinfo.

    mounted: the filesystem's folder that is visible at ``point``, the mount point.
    """

    filesystem: str
    options: list[str]
    mounted: str
    point: Path


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        yield _Mount(after[0], after[-1].split(","), before[3], root / before[4].lstrip("/"))
