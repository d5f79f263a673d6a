"""Compile an ONNX model into a QPC by the SDK's command-line compiler, in a separate process.

Qualcomm's package ``qaic`` can compile too, but not in a process that has imported torch. A note in the source of
Qualcomm's page says this (quic/cloud-ai-sdk-pages, docs/Python-API/qaic/qaic.md).
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlinfer.toolchain import process
from dlinfer.vendor.qaic.errors import QaicCompileError
from dlinfer.vendor.qaic.model_file import QPC_NAME
from dlinfer.vendor.qaic.options.table import OPTIONS

# The hardware's name for each tool: "2.0" in the compile guide, "ai100" in newer samples.
HARDWARE = {"qaic-exec": "2.0", "qaic-compile": "ai100"}
SECONDS = 4 * 3600.0
"""The time limit of a compilation. Large language models take up to an hour."""
NO_FLAGS = ("output_dir", "compile_only")  # the caller's, or on every line


def command(compiler: Path, model: Path, folder: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the command line that compiles ``model`` into the new folder ``folder``.

    options: those of the compiler.
    """
    line = [
        str(compiler),
        f"-m={model}",
        "-aic-hw",
        f"-aic-hw-version={HARDWARE.get(compiler.name, '2.0')}",
        f"-aic-binary-dir={folder}",
        "-compile-only",
    ]
    for name, value in options.items():
        if name not in NO_FLAGS:
            line += OPTIONS[name].arguments(value)
    return line


def compile_model(compiler: Path, model: Path, output_dir: Path, options: Mapping[str, Any]) -> Path:
    """Compile a model into ``output_dir``, and return the path of the QPC. Raises QaicCompileError.

    The compiler writes into a temporary folder. After its success, the new files move to ``output_dir`` and replace
    files with the same names. Other files in ``output_dir`` stay.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".compiling-", dir=output_dir) as scratch:
            compiled = Path(scratch) / "qpc"
            _run(command(compiler, model.resolve(), compiled, options), model)
            if not (compiled / QPC_NAME).is_file():
                raise QaicCompileError(
                    path=str(model), detail=f"{compiler} succeeded but wrote no {QPC_NAME}"
                )
            for item in compiled.iterdir():
                os.replace(item, output_dir / item.name)
    except OSError as cause:
        raise QaicCompileError(path=str(model), detail=f"{type(cause).__name__}: {cause}") from cause
    return output_dir / QPC_NAME


def _run(line: list[str], model: Path) -> None:
    try:
        process.run(line, seconds=SECONDS)
    except process.ProcessFailedError as failed:
        said = " ".join(" ".join(failed.lines).split())[-2000:] or "it printed nothing"
        raise QaicCompileError(path=str(model), detail=f"{' '.join(line)}: {failed}: {said}") from failed
