"""Compile ONNX models to bmodels by Sophgo's compiler, which runs in another process, and combine bmodels."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlinfer.graph.cache.key import canonical_text
from dlinfer.toolchain.process import ProcessFailedError, Stop
from dlinfer.vendor.sophgo.compiler import cache, process
from dlinfer.vendor.sophgo.compiler.options import BmodelOptions, check_name, require
from dlinfer.vendor.sophgo.errors import SophgoCompileError, SophgoModelError
from dlinfer.vendor.sophgo.runtime import bmodel as bmodel_file

_FORMAT = 1
"""A part of every cache key. Increase it when the form of jobs changes, so that old files are not used."""

Progress = Callable[[str], None]


def compile_onnx(
    model: bytes | Path,
    *,
    name: str,
    options: BmodelOptions | None = None,
    calibration: Sequence[Mapping[str, np.ndarray]] = (),
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> Path:
    """Compile an ONNX model, or find it in the cache. Return the bmodel, a file of the cache that must not be changed.

    model: the content of an .onnx file, or its path, with external weights beside it. Its inputs must have fixed sizes.
    name: the net's name in the bmodel.
    calibration: for INT8, at least one dict from input name to array; for other formats, empty.
    progress: called with the name of each step (transform, calibrate, compile), unless the cache has the bmodel.
    stop: ends the compiler from another thread.

    The net's floating inputs and outputs have the dtype that ``options.quantize`` names (float32 for INT8); integers
    are int32. Inputs and outputs keep the model's order, but the compiler renames outputs. If several calls need the
    same net, in this process or others, one of them compiles it and the others wait.

    Raises SophgoOptionError for a bad option or argument.
    Raises ToolchainMissingError if the toolchain is not installed.
    Raises SophgoCompileError if the compiler fails.
    Raises StoppedError after ``stop``.
    """
    chosen = options if options is not None else BmodelOptions()
    check_name(name)
    fits = (chosen.quantize == "INT8") == bool(calibration)
    expected = "at least one set of inputs for INT8, and none for other formats"
    require(fits, "calibration", f"{len(calibration)} sets", expected)
    stop = stop if stop is not None else Stop()
    key = _key(model, name, chosen, calibration)
    what, target = f"net {name!r}", f"{chosen.chip} as {chosen.quantize}"
    try:
        if (kept := cache.kept(key)) is not None:
            return kept
        with cache.alone(key, stop), cache.scratch() as folder:
            if (kept := cache.kept(key)) is not None:  # another call compiled it meanwhile
                return kept
            job, log = _job(folder, model, name, chosen, calibration), folder / "log"
            with _explained(what, target, log, key):
                run = partial(_run, log=log, timeout=chosen.timeout, progress=progress, stop=stop)
                net = _compiled(folder, job, run)
            return cache.store(net, key)
    except OSError as error:  # usually a full disk
        detail = f"{error.strerror or error} ({error.filename or cache.place()})"
        raise SophgoCompileError(what=what, target=target, detail=detail, log="none") from error


def combine(bmodels: Sequence[Path], to: Path, timeout: float = BmodelOptions.timeout) -> None:
    """Combine bmodels for one chip into the file ``to``. Nets with the same name become stages of one net.

    Nets keep the order of their first files. A net's stages are sorted by working memory, the largest first: in another
    order BMRuntime may run a stage in memory that it has freed (docs/vendors/sophgo.md).

    ``to`` is written only if everything succeeds.
    Raises SophgoModelError for a file that is not a bmodel.
    Raises ToolchainMissingError, SophgoCompileError and OSError.
    """
    to = to.resolve()
    with tempfile.TemporaryDirectory(prefix=".combining-", dir=to.parent) as scratch:
        folder = Path(scratch)
        combined, log = folder / "combined.bmodel", folder / "log"
        command = [process.model_tool(), "--combine", *map(str, _largest_first(bmodels)), "-o", str(combined)]
        with _explained(f"{len(bmodels)} bmodels", to.name, log, "combine"):
            process.run(command, folder, log, timeout)
            _checked(combined)
        os.replace(combined, to)


def _largest_first(bmodels: Sequence[Path]) -> list[Path]:
    """Group bmodel files by their nets, and sort each group by working memory, the largest first."""
    nets: dict[tuple[str, ...], dict[Path, int]] = {}
    for path in bmodels:
        memory = bmodel_file.read_file(path).memory
        largest = max((sum(parts) for stages in memory.values() for parts in stages), default=0)
        nets.setdefault(tuple(memory), {})[path] = largest
    return [path for files in nets.values() for path in sorted(files, key=lambda file: -files[file])]


def describe(bmodel: Path) -> str:
    """Return the output of Sophgo's ``model_tool --info``. Raises ToolchainMissingError and SophgoCompileError."""
    with tempfile.TemporaryDirectory(prefix="dlinfer-") as scratch:
        folder = Path(scratch)
        log = folder / "log"
        with _explained(str(bmodel), "a description", log, "info"):
            process.run([process.model_tool(), "--info", str(bmodel.resolve())], folder, log, 120.0)
        return log.read_text(errors="replace")


def _compiled(folder: Path, job: dict[str, Any], run: Callable[[Path, dict[str, Any]], Path]) -> Path:
    try:
        return run(folder / "first", job)
    except ProcessFailedError as failed:
        if not _died_optimising(failed):
            raise
    job["deploy"] += ["--opt", "1"]
    return run(folder / "again", job)


def _run(
    folder: Path, job: dict[str, Any], *, log: Path, timeout: float, progress: Progress | None, stop: Stop
) -> Path:
    folder.mkdir()
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    process.run(process.driver_command(path), folder, log, timeout, progress, stop)
    return _checked(folder / "net.bmodel")


def _died_optimising(failed: ProcessFailedError) -> bool:
    """Return whether the compiler's optimiser crashed. The log then ends with the failed command and gives no reason.

    At its default level the optimiser crashes on some nets that compile at level 1.
    """
    commands = [line for line in failed.lines if "RuntimeError: [!Error]: tpuc-opt" in line]
    return bool(commands) and "--processor-tpu-optimize" in commands[-1]


def _job(
    folder: Path,
    model: bytes | Path,
    name: str,
    options: BmodelOptions,
    calibration: Sequence[Mapping[str, np.ndarray]],
) -> dict[str, Any]:
    """Write the files of a compilation to ``folder``. Return the job, a dict that ``driver.py`` reads as JSON."""
    source = folder / "net.onnx" if isinstance(model, bytes) else model.resolve()
    if isinstance(model, bytes):
        source.write_bytes(model)
    paths = [folder / f"calibration_{index}.npz" for index in range(len(calibration))]
    for path, inputs in zip(paths, calibration, strict=True):
        arrays: Any = dict(inputs)
        np.savez(path, **arrays)
    deploy = ["--mlir", "net.mlir", "--chip", options.chip, "--quantize", options.quantize]
    deploy += ["--addr_mode", options.addr_mode, "--num_core", str(options.cores), "--model", "net.bmodel"]
    if options.quantize.startswith("W"):
        deploy += ["--q_group_size", str(options.group_size)]
    if calibration:
        deploy += ["--calibration_table", "net.table"]
    elif options.quantize != "F32":
        deploy += ["--quant_input", "--quant_output"]
    if options.dynamic:
        deploy += ["--dynamic"]
    return {
        "transform": ["--model_name", name, "--model_def", str(source), "--mlir", "net.mlir"],
        "deploy": deploy,
        "calibration": [str(path) for path in paths],
        "mlir": "net.mlir",
        "table": "net.table",
    }


def _checked(bmodel: Path) -> Path:
    """Return the path of a bmodel. Raises ProcessFailedError if the file is missing or incomplete.

    The compiler exits with status 0 even if the disk is full.
    """
    if not bmodel.is_file():
        raise ProcessFailedError("it succeeded but wrote no bmodel", ())
    try:
        bmodel_file.read_file(bmodel)
    except SophgoModelError as error:
        how = f"it succeeded but wrote an incomplete bmodel: {error.fields['detail']}"
        raise ProcessFailedError(how, ()) from error
    return bmodel


_TELLING = ("Error", "error:", "assert", "Assert", "not support", "unsupported", "failed")
_NOISE = ("Traceback", 'File "', "raise ", "[Running]", "onnxsim opt failed", "_os_system(")


@contextlib.contextmanager
def _explained(what: str, target: str, log: Path, key: str) -> Iterator[None]:
    """Turn ProcessFailedError into SophgoCompileError with the log's error messages, and keep the log.

    what, target: the thing to compile and the result, for the message. key: the name of the kept log.
    """
    try:
        yield
    except ProcessFailedError as failed:
        kept = cache.place() / "logs" / f"{key}.log"
        kept.parent.mkdir(parents=True, exist_ok=True)
        if log.is_file():
            shutil.copyfile(log, kept)
        lines = [line.strip() for line in failed.lines if not any(word in line for word in _NOISE)]
        printed = ([line for line in lines if any(word in line for word in _TELLING)] or lines)[-4:]
        detail = f"{failed}; it printed: {' | '.join(printed)}" if printed else str(failed)
        raise SophgoCompileError(what=what, target=target, detail=detail, log=str(kept)) from failed


def _key(
    model: bytes | Path, name: str, options: BmodelOptions, calibration: Sequence[Mapping[str, np.ndarray]]
) -> str:
    """Return the cache key: a digest of the compiler, driver, name, options, model and calibration."""
    driver = hashlib.sha256(process.DRIVER.read_bytes()).hexdigest()
    identity = [_FORMAT, process.compiler_version(), driver, name, options.identity()]
    digest = hashlib.sha256(canonical_text(identity).encode())
    if isinstance(model, bytes):
        digest.update(model)
    else:
        for path in _files(model):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    for inputs in calibration:
        for key in sorted(inputs):
            value = np.ascontiguousarray(inputs[key])
            digest.update(f"{key} {value.dtype} {value.shape}".encode())
            digest.update(value.tobytes())
    return digest.hexdigest()[:32]


def _files(model: Path) -> list[Path]:
    """Return the path of a model, and the paths of its external weights."""
    import onnx

    loaded = onnx.load(str(model), load_external_data=False)
    entries = (entry for tensor in loaded.graph.initializer for entry in tensor.external_data)
    places = {entry.value for entry in entries if entry.key == "location"}
    return [model, *(model.parent / place for place in sorted(places))]
