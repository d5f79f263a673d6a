"""Compile a Hugging Face folder to one bmodel, which contains all nets of the model."""

import errno
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlinfer.toolchain.process import Stop
from dlinfer.vendor.sophgo.compiler import packages
from dlinfer.vendor.sophgo.compiler.compile import combine, compile_onnx
from dlinfer.vendor.sophgo.compiler.options import BmodelOptions, require
from dlinfer.vendor.sophgo.compiler.process import toolchain
from dlinfer.vendor.sophgo.errors import SophgoUnavailableError
from dlinfer.vendor.sophgo.llm import folder as hf
from dlinfer.vendor.sophgo.llm import parts
from dlinfer.vendor.sophgo.llm.parts import Part

Progress = Callable[[int, int, str], None]
"""Takes the number of compiled nets, the number of all nets, and the name of the net that was compiled last."""


@dataclass(frozen=True)
class LlmOptions:
    """Options for compiling a language model. The constructor raises SophgoOptionError for a bad value.

    compiler: the compiler's options, for each net.
    seq_length: the number of tokens that the KV cache holds, prompt and answer together.
    stages: the prompt lengths of the prefill nets, ascending; empty means only ``seq_length``.
    jobs: the number of compilers that run at once.
    """

    compiler: BmodelOptions = field(default_factory=BmodelOptions)
    seq_length: int = 512
    stages: tuple[int, ...] = ()
    jobs: int = 1

    def __post_init__(self) -> None:
        quantize, dynamic, longest = self.compiler.quantize, self.compiler.dynamic, self.seq_length
        floats = "F32, F16, BF16, or weights of 8 or 4 bits (W8F16, W4BF16, ...)"
        require(quantize != "INT8", "quantize", quantize, f"{floats}: INT8 needs calibration of each net")
        require(not dynamic, "dynamic", dynamic, "False: a model's lengths are compiled as stages")
        lengths = tuple(self.stages) if isinstance(self.stages, (tuple, list)) else (self.stages,)
        for name, values in {"seq_length": (longest,), "stages": lengths, "jobs": (self.jobs,)}.items():
            require(all(type(value) is int for value in values), name, getattr(self, name), "whole numbers")
        require(longest >= 2, "seq_length", longest, "2 tokens or more")
        stages = lengths or (longest,)
        fits = all(1 < stage <= longest for stage in stages) and list(stages) == sorted(set(stages))
        require(fits, "stages", stages, f"ascending lengths from 2 to seq_length ({longest})")
        require(self.jobs >= 1, "jobs", self.jobs, "1 or more")
        object.__setattr__(self, "stages", stages)


def compile_folder(
    folder: Path, to: Path, options: LlmOptions | None = None, progress: Progress | None = None
) -> None:
    """Compile the model in ``folder`` to the bmodel ``to``, which is written only if everything succeeds.

    The cache keeps each compiled net. So a second call compiles only the nets that are new, for example those of
    another stage. If a net fails or this call is interrupted, the running compilers are killed.

    Raises SophgoUnavailableError if packages are missing.
    Raises ModelFolderError if the folder cannot be read.
    Raises UnsupportedFeatureError for a kind of model that cannot be compiled.
    Raises ToolchainMissingError, SophgoCompileError and OSError.
    """
    chosen = options if options is not None else LlmOptions()
    missing = packages.missing(packages.LLM)
    if missing:
        what = "dlinfer compile --engine sophgo"
        raise SophgoUnavailableError(what=what, reason=f"{missing} not installed", advice=packages.ADVICE)
    toolchain()  # fail before the minutes of loading
    _check_place(to)
    model = hf.load(folder, chosen.seq_length)
    total = sum(1 for _ in _plan(model, chosen))
    nets: dict[int, Path] = {}
    stop = Stop()
    with tempfile.TemporaryDirectory(prefix="dlinfer-") as scratch, ThreadPoolExecutor(chosen.jobs) as pool:
        running = {}
        try:
            for index, part in enumerate(_plan(model, chosen)):
                # torch.export is for one thread at a time; the compilers are separate processes.
                running[pool.submit(_job(part, chosen.compiler, Path(scratch), stop))] = index
                _wait(running, nets, total, progress, chosen.jobs)
            _wait(running, nets, total, progress, 1)
        except BaseException:
            stop.now()  # the pool waits for running jobs
            raise
    combine([nets[index] for index in sorted(nets)], to)


def _check_place(to: Path) -> None:
    """Raise OSError now if ``to`` cannot be written, rather than after the compilation."""
    if to.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(to))
    to.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=to.parent).close()


def _plan(model: Any, options: LlmOptions) -> Iterator[Callable[[], Part]]:
    """Yield, in the bmodel's order, a function for each net that builds the net with a copy of its weights."""
    capacity = options.seq_length
    tables = hf.rotary_tables(model, capacity)
    layers = range(model.config.num_hidden_layers)
    for length in (1, *options.stages):
        yield lambda length=length: parts.embedding(model, length)
    for index in layers:
        for length in options.stages:
            yield lambda index=index, length=length: parts.block(model, index, tables, length)
        yield lambda index=index: parts.block_cache(model, index, tables, capacity)
    yield lambda: parts.head(model)


def _wait(
    running: dict[Any, int], nets: dict[int, Path], total: int, progress: Progress | None, allowed: int
) -> None:
    """Wait until fewer than ``allowed`` compilations are running. If a compilation has failed, raise its error.

    running: compilation -> index of its net. Finished compilations are removed from it.
    nets: index of a net -> its bmodel. The bmodels of finished compilations are added to it.
    """
    while len(running) >= allowed:
        done = next(as_completed(running))
        path, name = done.result()
        nets[running.pop(done)] = path
        if progress is not None:
            progress(len(nets), total, name)


def _job(
    make: Callable[[], Part], options: BmodelOptions, scratch: Path, stop: Stop
) -> Callable[[], tuple[Path, str]]:
    """Write a net as ONNX. Return a function that compiles it, deletes the ONNX, and returns the bmodel and its name.

    make: a function that builds the net.
    """
    folder = tempfile.TemporaryDirectory(dir=scratch)
    part = make()
    name, model = part.name, part.onnx(Path(folder.name))
    del part
    gc.collect()  # graphs are reference cycles, and hold copies of some layers' weights

    def compiled() -> tuple[Path, str]:
        with folder:
            return compile_onnx(model, name=name, options=options, stop=stop), name

    return compiled
