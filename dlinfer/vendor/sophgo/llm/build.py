"""From a Hugging Face folder to one bmodel with all nets of the model."""

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
"""Told (nets that are compiled, nets in all, the last one's name)."""


@dataclass(frozen=True)
class LlmOptions:
    """What a model's bmodel is to be. Making one raises SophgoOptionError.

    compiler: how each net is compiled. seq_length: tokens of prompt and answer that the KV cache holds.
    stages: lengths of prompts that one run of a prefill takes, ascending; empty is one of ``seq_length``.
    jobs: compilers that run at once.
    """

    compiler: BmodelOptions = field(default_factory=BmodelOptions)
    seq_length: int = 512
    stages: tuple[int, ...] = ()
    jobs: int = 1

    def __post_init__(self) -> None:
        quantize, dynamic, longest = self.compiler.quantize, self.compiler.dynamic, self.seq_length
        floats = "F32, F16, BF16, or weights of 8 or 4 bits (W8F16, W4BF16, ...)"
        require(quantize != "INT8", "quantize", quantize, f"{floats}: INT8 wants calibration of each net")
        require(not dynamic, "dynamic", dynamic, "False: a model's lengths are stages")
        lengths = tuple(self.stages) if isinstance(self.stages, (tuple, list)) else (self.stages,)
        for name, given in {"seq_length": (longest,), "stages": lengths, "jobs": (self.jobs,)}.items():
            require(all(type(one) is int for one in given), name, getattr(self, name), "whole numbers")
        require(longest >= 2, "seq_length", longest, "2 tokens or more")
        stages = lengths or (longest,)
        fits = all(1 < one <= longest for one in stages) and list(stages) == sorted(set(stages))
        require(fits, "stages", stages, f"ascending lengths from 2 to seq_length ({longest})")
        require(self.jobs >= 1, "jobs", self.jobs, "1 or more")
        object.__setattr__(self, "stages", stages)


def compile_folder(
    folder: Path, to: Path, options: LlmOptions | None = None, progress: Progress | None = None
) -> None:
    """Write the bmodel of the model in ``folder`` to ``to``, whole or not at all.

    Each net is kept in the cache by its content, so that a second call, or one with another stage, compiles only
    what is new. When a net fails or this call is interrupted, the compilers that still run are ended.

    Raises SophgoUnavailableError where packages are missing, ModelFolderError, UnsupportedFeatureError,
    ToolchainMissingError, SophgoCompileError and OSError.
    """
    chosen = options if options is not None else LlmOptions()
    missing = packages.missing(packages.LLM)
    if missing:
        what = "dlinfer compile --engine sophgo"
        raise SophgoUnavailableError(what=what, reason=f"{missing} not installed", advice=packages.ADVICE)
    toolchain()  # before minutes are spent on loading
    _check_place(to)
    model = hf.load(folder, chosen.seq_length)
    total = sum(1 for _ in _plan(model, chosen))
    made: dict[int, Path] = {}
    stop = Stop()
    with tempfile.TemporaryDirectory(prefix="dlinfer-") as scratch, ThreadPoolExecutor(chosen.jobs) as pool:
        running = {}
        try:
            for index, part in enumerate(_plan(model, chosen)):
                # torch.export is for one thread at a time; the compilers are processes of their own.
                running[pool.submit(_job(part, chosen.compiler, Path(scratch), stop))] = index
                _wait(running, made, total, progress, chosen.jobs)
            _wait(running, made, total, progress, 1)
        except BaseException:
            stop.now()  # the pool waits for what is running
            raise
    combine([made[index] for index in sorted(made)], to)


def _check_place(to: Path) -> None:
    """Raise now what writing ``to`` would raise after all is compiled."""
    if to.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(to))
    to.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=to.parent).close()


def _plan(model: Any, options: LlmOptions) -> Iterator[Callable[[], Part]]:
    """How to make each net, in the bmodel's order. A net is made when it is compiled: its weights are copies."""
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
    running: dict[Any, int], made: dict[int, Path], total: int, progress: Progress | None, allowed: int
) -> None:
    """Wait until fewer than ``allowed`` nets are being compiled, and raise what one raised."""
    while len(running) >= allowed:
        done = next(as_completed(running))
        path, name = done.result()
        made[running.pop(done)] = path
        if progress is not None:
            progress(len(made), total, name)


def _job(
    make: Callable[[], Part], options: BmodelOptions, scratch: Path, stop: Stop
) -> Callable[[], tuple[Path, str]]:
    """The compilation of a net that has been written as ONNX; its files go with it."""
    folder = tempfile.TemporaryDirectory(dir=scratch)
    part = make()
    name, model = part.name, part.onnx(Path(folder.name))
    del part
    gc.collect()  # graphs refer to themselves, and would keep copies of some layers' weights

    def compiled() -> tuple[Path, str]:
        with folder:
            return compile_onnx(model, name=name, options=options, stop=stop), name

    return compiled
