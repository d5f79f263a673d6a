"""Build MegEngine models from node lists in the toolchain's environment, or read them from the disk cache."""

import tempfile
from pathlib import Path

from dlinfer.graph.cache.disk import ArtifactCache
from dlinfer.graph.cache.fingerprint import environment
from dlinfer.graph.cache.key import Key, digest
from dlinfer.settings import cache_folder
from dlinfer.toolchain import find, process
from dlinfer.vendor.megengine.errors import LiteBuildError
from dlinfer.vendor.megengine.nodes import NodeList
from dlinfer.vendor.megengine.toolchain import TOOLCHAIN

SECONDS = 300
"""Seconds until a build is stopped. A build usually takes about two seconds."""

_BUILDER = Path(__file__).with_name("builder.py")


def model_of(graph: NodeList) -> bytes:
    """Return the .mge file of a node list. The disk cache's key is a hash of the list, the builder and the toolchain.

    The file has no weights: they are inputs of the model. Raises LiteBuildError and ToolchainMissingError."""
    text = graph.text()
    key = Key(
        kind="megengine",
        subject=digest(text),
        environment=environment(),
        content=(text,),
        engine="megengine",
        engine_identity={"builder": digest(_BUILDER.read_text()), "toolchain": TOOLCHAIN.digest},
    )
    cache = ArtifactCache(cache_folder(), "megengine")
    model = cache.load(key, bytes)
    if model is None:
        built = model = _built(text)
        cache.store(key, lambda: built)
    return model


def _built(text: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="dlinfer-megengine-") as folder:
        source, target = (Path(folder) / name for name in ("graph.json", "model.mge"))
        source.write_text(text)
        command = [find(TOOLCHAIN).python, "-I", _BUILDER, source, target]
        environment = process.own_environment(MGE_FASTRUN_CACHE_TYPE="MEMORY")
        try:
            output = process.run(command, seconds=SECONDS, environment=environment)
        except process.ProcessFailedError as failed:
            detail = " | ".join(map(str.strip, failed.lines[-4:]))[-800:]
            raise LiteBuildError(detail=f"{failed}: {detail}" if detail else str(failed)) from failed
        if not target.is_file():
            raise LiteBuildError(detail=f"it succeeded but wrote no model: {' | '.join(output[-4:])[-800:]}")
        return target.read_bytes()
