"""A folder with torch_npu of one version and stubs of its driver, beside every environment: ``make torch-npu``.

It is no environment to install things into: the package's dist-info would make ``import torch`` fail without CANN. A
child process is given it on PYTHONPATH, with torch's autoload off.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from dlinfer import settings
from tests.vendor.ascend.vendor_package import stubs

VERSION = "2.13.0"
"""Of torch_npu, which fits torch of the same version."""
STAMP = "made.json"
READ_SCHEMAS = Path(__file__).with_name("read_schemas.py")


def folder() -> Path:
    """Where it lies, or will."""
    return settings.cache_folder() / "toolchains" / f"torch_npu-{VERSION}"


def missing() -> str:
    """Why it cannot be used here; empty where it can."""
    if not (folder() / STAMP).exists():
        return f"torch_npu {VERSION} is not at {folder()}: make torch-npu"
    if torch.__version__.split("+")[0] != VERSION:
        return f"torch_npu {VERSION} loads with torch {VERSION} only, and this is {torch.__version__}"
    return ""


def make() -> Path:
    """Download the package (44 MB of PyPI) and build its stubs; does nothing where it is there."""
    place = folder()
    if (place / STAMP).exists():
        return place
    shutil.rmtree(place, ignore_errors=True)
    site = place / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-compile", "--target", str(site), f"torch_npu=={VERSION}"], check=True)
    made = stubs.build(site / "torch_npu", Path(torch.__file__).parent / "lib", place / "stubs")
    schemas = read_schemas(place)
    (place / STAMP).write_text(json.dumps({"stubs": [path.name for path in made], "schemas": len(schemas)}))
    return place


def read_schemas(place: Path | None = None) -> list[str]:
    """The schemas of all ops of the namespaces npu and atb, as the vendor's binaries declare them."""
    place = place or folder()
    site = str(place / "site")
    surroundings = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH")))),
        "LD_LIBRARY_PATH": str(place / "stubs"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, str(READ_SCHEMAS)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("npu::", "atb::"))]
    if not lines:
        raise RuntimeError(
            f"torch_npu could not be read (exit status {done.returncode}): {done.stderr[-3000:]}"
        )
    return lines


if __name__ == "__main__":
    print(make())
