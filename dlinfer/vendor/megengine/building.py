"""Models of node lists, from the cache or made in the toolchain's environment."""

import hashlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.settings import cache_folder
from dlinfer.toolchain import find
from dlinfer.vendor.megengine.errors import LiteBuildError
from dlinfer.vendor.megengine.nodes import NodeList
from dlinfer.vendor.megengine.toolchain import TOOLCHAIN

SECONDS = 300
"""What a build may take; one takes about two seconds."""

_BUILDER = Path(__file__).with_name("builder.py")


def model_of(graph: NodeList) -> bytes:
    """The .mge of a node list, kept on disk under a hash of the list, the builder and the toolchain.

    It holds no weights: they are inputs. Raises LiteBuildError, and ToolchainMissingError.
    """
    text = graph.text()
    key = f"{text}\n{hashlib.sha256(_BUILDER.read_bytes()).hexdigest()}\n{TOOLCHAIN.digest}"
    cache = ArtifactCache(cache_folder(), "megengine")
    model = cache.load(key, lambda path: Path(path).read_bytes())
    if model is None:
        model = _built(text)
        cache.store(key, model, _write)
    return model


def _write(model: bytes, path: str) -> None:
    Path(path).write_bytes(model)


def _built(text: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="dlinfer-megengine-") as folder:
        source, target, log = (Path(folder) / name for name in ("graph.json", "model.mge", "log"))
        source.write_text(text)
        command = [find(TOOLCHAIN).python, "-I", _BUILDER, source, target]
        quiet = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=quiet | {"MGE_FASTRUN_CACHE_TYPE": "MEMORY"},
                start_new_session=True,
            )
            try:
                status = child.wait(SECONDS)
            except subprocess.TimeoutExpired:
                raise LiteBuildError(detail=f"it took more than {SECONDS} s") from None
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        if status or not target.is_file():
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise LiteBuildError(detail=" | ".join(lines[-4:])[-800:] or f"exit status {status}")
        return target.read_bytes()
