"""The ways by which a program reaches an engine: torch.compile, an artifact, a saved one, a bound call."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

import dlinfer
from dlinfer.errors import (
    ArtifactCorruptError,
    ArtifactError,
    ArtifactInputError,
    CaptureError,
    GraphRunError,
    KVLayoutChangedError,
    TorchStateChangedError,
)
from dlinfer.graph.bound_call.call import BoundCall
from dlinfer.graph.bound_call.capture import capture_call
from dlinfer.graph.lowering.apart import SharedMemoryError
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report import report
from dlinfer.graph.torch_private import inductor
from dlinfer.graph.torch_private.dynamo import mark_unbacked
from dlinfer.vendor.cpu.inductor import clusters
from tests.fuzz import memory
from tests.fuzz.execute import Forward, flat, plain
from tests.fuzz.program import Program


class Refused(Exception):
    """A door that says that it does not take such a program, or such a call."""


def options(engine: str) -> dict[str, Any]:
    """What every compilation is told: the engine gets all that it takes, and what it refuses runs eagerly."""
    return {"engine": engine, "fallback": "allow", "small_regions": "engine"}


@contextlib.contextmanager
def opened(program: Program, model: torch.nn.Module, engine: str) -> Iterator[Forward]:
    """The program behind its door. Raises Refused, when it is opened or called."""
    if program.door == "compile":
        compiled = torch.compile(model, backend="dlinfer", dynamic=program.dynamic, options=options(engine))
        yield plain(compiled)
        return
    if program.door == "direct":
        yield _Direct(program, model, engine)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield _Artifact(program, model, engine, Path(folder))


_REFUSALS = (
    CaptureError,
    ArtifactInputError,
    ArtifactError,
    KVLayoutChangedError,
    TorchStateChangedError,
    SharedMemoryError,
)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What a door of fixed promises says no with is Refused."""
    try:
        yield
    except ArtifactCorruptError:
        raise
    except _REFUSALS as cause:
        raise Refused(f"{type(cause).__name__}: {cause}") from cause
    except GraphRunError as cause:
        if "Runtime assertion failed for expression" in str(cause):  # a size is not what tracing took it for
            raise Refused(f"{type(cause).__name__}: {cause}") from cause
        raise


class _Direct:
    """A call without guards; made at the first call."""

    def __init__(self, program: Program, model: torch.nn.Module, engine: str) -> None:
        self.program, self.model, self.engine = program, model, engine
        self.call: BoundCall | None = None

    def __call__(self, arguments: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        for one in self.program.of_role("argument"):
            for dim, size in enumerate(one.shape):
                if isinstance(size, str) and dim < arguments[one.name].dim():
                    mark_unbacked(arguments[one.name], dim, size)
        with refusals():
            if self.call is not None:
                return (self.call(**arguments),)
            chosen = CompileOptions.of(options(self.engine))
            self.call, result = capture_call(self.model, dict(arguments), steady=(), options=chosen)
            return (result,)


class _Artifact:
    """An artifact of the first call's sizes, those with names open where torch.export finds them so."""

    def __init__(self, program: Program, model: torch.nn.Module, engine: str, folder: Path) -> None:
        self.program, self.model, self.engine, self.folder = program, model, engine, folder
        self.run: Any = None

    def __call__(self, arguments: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with refusals():
            if self.run is None:
                self.run = self._made(arguments)
            return self.run(arguments)

    def _made(self, arguments: Mapping[str, torch.Tensor]) -> Any:
        example, shapes = {}, {}
        views = memory.plan(self.program, self.program.calls[0], ("argument",))
        for one in self.program.of_role("argument"):  # copies: making an artifact does not run the module
            given = arguments[one.name]
            same = views[one.name].same_as
            example[one.name] = example[same] if same else given.clone()
            named = {dim: Dim.AUTO for dim, size in enumerate(one.shape) if isinstance(size, str)}
            shapes[one.name] = named if self.program.dynamic is not False else {}
        artifact = dlinfer.compile(
            self.model, (), example, dynamic_shapes=shapes, options=options(self.engine)
        )
        if self.program.door == "artifact":
            return lambda given: flat(artifact(**given))
        path = self.folder / "program.dlinfer"
        artifact.save(path)
        session = dlinfer.load(path)
        return lambda given: tuple(flat(session.run(dict(given))))


def graphs() -> int:
    """How many graphs were compiled in this process so far."""
    found = report.reports()
    return found[-1].index + 1 if found else 0


@contextlib.contextmanager
def loops_interpreted() -> Iterator[None]:
    """The engine inductor without g++: clusters run node by node, and read their inputs by the strides that compiled
    loops would trust."""
    before = inductor.compile_loops
    inductor.compile_loops = _trusting
    try:
        yield
    finally:
        inductor.compile_loops = before


def _trusting(graph: Any, fakes: Any, mode: Any) -> Any:
    order = [_order(fake) for fake in fakes]
    made = clusters.node_by_node(graph)  # compiled loops fill memory of the strides that the fakes have

    def run(*inputs: Any) -> Any:
        return made(*(_read_as(one, by) for one, by in zip(inputs, order, strict=True)))

    return run


def _order(fake: Any) -> Any:
    return fake if isinstance(fake, torch.Tensor) else None


def _read_as(given: Any, fake: Any) -> Any:
    if not isinstance(given, torch.Tensor) or fake is None:
        return given
    fixed = [(dim, size) for dim, size in enumerate(fake.shape) if isinstance(size, int)]
    if given.dtype != fake.dtype or any(
        given.dim() <= dim or given.shape[dim] != size for dim, size in fixed
    ):
        raise RuntimeError(
            f"loops for {fake.dtype} {tuple(fake.shape)} read {given.dtype} {tuple(given.shape)}"
        )
    if not all(isinstance(stride, int) for stride in fake.stride()) or fake.stride() == given.stride():
        return given
    return given.as_strided(given.size(), fake.stride())
