"""Inductor: its decompositions and settings, and loops that it compiles, saves and loads."""

# Parts of torch have no types, and some names are private.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

import functools
import math
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

_PROCESS = uuid.uuid4().hex
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "_fuse_ddp_communication_passes",
)
"""Inductor's settings that hold functions. torch leaves them out of the portable configuration."""


def decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Return the decompositions that inductor applies before it lowers a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def calls_library(op: object) -> bool:
    """Return whether inductor calls torch's kernel for an op instead of a loop of its own."""
    from torch._inductor import lowering

    return op not in lowering.lowerings or op in lowering.fallbacks


def configuration() -> tuple[dict[str, object], dict[str, object]]:
    """Return two dicts: all settings of inductor and aot_autograd, and the settings that differ from their defaults.

    Compiled code depends on all settings.
    """
    import torch._functorch.config as functorch
    from torch._inductor import config

    entries: Any = vars(config)["_config"]
    functions = {name: getattr(config, name) for name in _PASSES if name in entries}
    passes = {name: _pass_identity(value) for name, value in functions.items()}
    settings, changed = _portable(config.get_hash(), functorch.get_hash())
    changed_passes = {
        name: passes[name] for name, value in functions.items() if value != entries[name].default
    }
    return settings | passes, changed | changed_passes


@functools.lru_cache(maxsize=8)
def _portable(inductor: bytes, functorch: bytes) -> tuple[dict[str, object], dict[str, object]]:
    """Return both dicts of ``configuration``, without the settings that hold functions.

    inductor, functorch: hashes of the two configurations. They only select the cached result.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor import config

    settings: dict[str, object] = {}
    changed: dict[str, object] = {}
    modules: dict[str, Any] = {"": config, "functorch.": functorch_config}
    for prefix, module in modules.items():
        for name, value in module.save_config_portable(ignore_private_configs=False).items():
            if name not in _PASSES:
                settings[prefix + name] = value
                if module._config[name].default != value:
                    changed[prefix + name] = value
    return settings, changed


def _pass_identity(custom: object) -> object:
    """Return the identity of a custom pass. A function without a uuid gets a different identity in each process."""
    if isinstance(custom, (list, tuple)):
        return list(map(_pass_identity, custom))
    if custom is None or isinstance(custom, str):  # the name of a pass of torch's own
        return custom
    identity = getattr(custom, "uuid", None)
    return identity() if callable(identity) else f"{custom!r} of process {_PROCESS}"


def compiler() -> str:
    """Return the version line of inductor's C++ compiler; ``none`` if there is no compiler."""
    from torch._inductor import config

    chosen: Any = config.cpp.cxx
    return _compiler((chosen,) if isinstance(chosen, str) else tuple(filter(None, chosen)))


@functools.cache
def _compiler(names: tuple[str, ...]) -> str:
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return "none"
    version = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False, errors="replace"
    )
    return version.stdout.strip().partition("\n")[0] or path


def compile_loops(graph_module: fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode) -> Any:
    """Compile a functional graph with inductor into a callable that can be saved.

    Guards on symbols are added to the mode's ShapeEnv; ``guards_of`` returns them.
    """
    from torch._guards import tracing
    from torch._inductor import standalone_compile

    patches = {
        "fallback_random": True,
        # Round to bfloat16 after each op, as eager mode does.
        "emulate_precision_casts": True,
        # Inductor's constant folding also turns ``x + zeros`` into x. Two results, or a result and an input, would
        # then share memory, and a later write to one would show in the other.
        "joint_graph_constant_folding": False,
    }
    # To load an artifact, inductor looks for the code in its own cache by a key, and takes the first entry. Only this
    # tag makes the key differ from the key of the same graph for other sizes.
    settings: Any = torch.compiler.config
    unique = settings.patch(cache_key_tag=f"dlinfer {uuid.uuid4().hex}")
    with unique, tracing(TracingContext(mode)):
        return standalone_compile(
            graph_module,
            list(fakes),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": patches},
        )


def remove_damaged_library(error: BaseException | None) -> bool:
    """Remove the library that could not be loaded from inductor's cache. Return False if the error is another one.

    Inductor's compiler writes a library in place. If the process is killed meanwhile, a part of the library stays, and
    every later process would fail to load it.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    while error is not None:
        if isinstance(error, ImportError) and error.path and Path(error.path).is_relative_to(cache_dir()):
            Path(error.path).unlink(missing_ok=True)
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False


def save_loops(artifact: Any) -> bytes:
    """Return the bytes of a callable from ``compile_loops``. Raises torch's error if torch cannot save it."""
    with tempfile.TemporaryDirectory(prefix="dlinfer-") as folder:
        path = Path(folder) / "loops"
        artifact.save(path=str(path), format="binary")
        return path.read_bytes()


def load_loops(contents: bytes) -> Callable[..., Any]:
    """Return the callable that ``save_loops`` wrote. Raises for damaged bytes, and for bytes of another torch."""
    from torch._inductor.standalone_compile import CompiledArtifact

    with tempfile.TemporaryDirectory(prefix="dlinfer-") as folder:
        path = Path(folder) / "loops"
        path.write_bytes(contents)
        return CompiledArtifact.load(path=str(path), format="binary")


@contextmanager
def results_from(large: Callable[..., torch.Tensor], least: int) -> Generator[None]:
    """Let ``large`` allocate the large results of compiled loops.

    This holds for loops that this thread compiles or loads in the ``with`` block, for as long as the loops live.
    Modules that are already in torch's code cache are not changed, because others use them too. Modules loaded in the
    block are changed, and removed from torch's code cache.

    large: takes (size, stride, dtype, bytes of an element). It is called for results of ``least`` bytes or more.
    """
    from torch._inductor.codecache import PyCodeCache

    def make(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if math.prod(size) * dtype.itemsize < least or _thread.escape:
            return plain(size, stride, dtype)
        return large(size, stride, dtype, dtype.itemsize)

    plain: Any = torch._C._dynamo.guards._empty_strided_cpu  # pyright: ignore[reportAttributeAccessIssue]
    with _loading:
        if not isinstance(PyCodeCache.modules, _LoadedModules):
            PyCodeCache.modules = _LoadedModules(PyCodeCache.modules)
    loaded: list[Any] = []
    outer, _thread.loaded = _thread.loaded, loaded
    try:
        yield
    finally:
        _thread.loaded = outer
        for module in loaded:
            if vars(module).get("empty_strided_cpu") is plain:
                vars(module)["empty_strided_cpu"] = make
                if PyCodeCache.modules_no_attr.get(module.__file__) is module:
                    del PyCodeCache.modules_no_attr[module.__file__]


def loops_escape(on: bool) -> None:
    """Say whether the loops that this thread runs from now on compute results that a graph returns to its caller.

    While ``on`` is True, torch allocates large results, and not the function ``large`` of ``results_from``.
    """
    _thread.escape = on


class _Thread(threading.local):
    """The state of one thread.

    escape: see ``loops_escape``.
    loaded: modules that the thread loaded in the block of ``results_from``; None outside such a block.
    """

    escape = False
    loaded: list[Any] | None = None


_thread = _Thread()
_loading = threading.Lock()


class _LoadedModules(list[Any]):
    """Inductor's list of loaded modules. It also tells ``results_from`` which modules each thread loads."""

    def append(self, module: object) -> None:
        super().append(module)
        if _thread.loaded is not None:
            _thread.loaded.append(module)
