"""Folders of what tests keep between runs, and cache folders of a test's own."""

import contextlib
import tempfile
from pathlib import Path

import pytest

from dlinfer.settings import cache_folder

SHARED = ("native", "selftest")
"""The kernels' library and what this CPU computes wrongly: the same in all folders, and half a minute of work."""


_KEPT = pytest.StashKey[Path]()


def kept_folder(config: pytest.Config) -> Path:
    """Tiny models, and what was answered of them: in pytest's cache folder (``.pytest_cache``, git-ignored), or in one
    that goes with ``-p no:cacheprovider``."""
    if _KEPT not in config.stash:
        if hasattr(config, "cache"):
            config.stash[_KEPT] = config.cache.mkdir("e2e")
        else:
            made = tempfile.TemporaryDirectory(prefix="dlinfer-e2e-")
            config.add_cleanup(made.cleanup)
            config.stash[_KEPT] = Path(made.name)
    return config.stash[_KEPT]


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
