"""Cache folders of a test's own."""

import contextlib
from pathlib import Path

from dlinfer.settings import cache_folder

SHARED = ("native", "known_answers")
"""The kernels' library and what this CPU computes wrongly: the same in all folders, and half a minute of work."""


def fresh_cache(folder: Path) -> Path:
    """``folder``, made as a cache folder in which no model and no cluster was compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHARED:
        source = cache_folder() / name
        source.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            (folder / name).unlink(missing_ok=True)  # into a cache that is gone
            with contextlib.suppress(FileExistsError):  # another process is at it
                (folder / name).symlink_to(source)
    return folder
