"""Compiles the CPU kernels into a wheel where torch and a C++ compiler are at hand.

``python -m build --wheel --no-isolation`` makes such a wheel. In an isolated build there is no torch: the wheel has the
sources alone, which the user's machine compiles at first use, as it does for an editable install.
"""

import importlib.util
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Adds the compiled libraries to a wheel, which then is of one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Hatchling calls it before it collects the wheel's files."""
        self._made: Path | None = None
        sys.path.insert(0, self.root)
        import hatch_version

        if said := hatch_version.sentence():
            self.app.display_info(said)
        if self.target_name != "wheel" or version == "editable":
            return
        if importlib.util.find_spec("torch") is None:
            self.app.display_warning("no torch in the build environment: kernels compile at first use")
            return
        from dlinfer.vendor.cpu import native, prebuilt

        self._made = Path(tempfile.mkdtemp(prefix="dlinfer-kernels-"))
        try:
            libraries = native.make_prebuilt(self._made)
        except native.BuildError as error:
            self.app.display_warning(f"kernels compile at first use: {error}")
            return
        if not libraries:  # another architecture than x86-64 and ARM64
            return
        folder = prebuilt.FOLDER.relative_to(self.root)
        build_data["force_include"] |= {str(path): str(folder / path.name) for path in libraries}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Hatchling calls it when the wheel is made."""
        if self._made is not None:
            shutil.rmtree(self._made)
