"""Compute the identity of a model's stored graphs: a description of everything that LMDeploy built the model from.

A stored graph may be used only for the same identity. The identity contains all fields of LMDeploy's configurations and
build context, except the fields in ``LEFT_OUT``, which cannot change a graph. A field that a later release adds is thus
included. If it does not matter, a graph is compiled once too often. A list of fields to include would miss a new field,
and a wrong graph could run.
"""

import enum
import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from lmdeploy.pytorch import envs
from lmdeploy.version import __version__ as lmdeploy_version

logger = logging.getLogger("dlinfer")

_SCHEDULED = "how much is scheduled at once: sizes that a graph leaves open"
_CACHE_SIZE = "how many blocks there are: sizes of the caches, which a stored graph compares with its own"
_WATCHED = "how the engine is watched while it runs"
_REUSE = "which blocks are used again: numbers in the block tables"

LEFT_OUT: dict[str, dict[str, str]] = {
    "BuildModelContext": {
        "max_batch_size": "sizes the buffers of DeepEP, part of expert parallelism, which is not served"
    },
    "CacheConfig": {
        "max_batches": _SCHEDULED,
        "max_prefill_token_num": _SCHEDULED,
        "cudagraph_capture_batch_sizes": _SCHEDULED,
        "num_cpu_blocks": _CACHE_SIZE,
        "num_gpu_blocks": _CACHE_SIZE,
        "num_reserved_gpu_blocks": _CACHE_SIZE,
        "cache_max_entry_count": _CACHE_SIZE,
        "enable_prefix_caching": _REUSE,
        "prefix_cache_state_budget": _REUSE,
        "prefix_cache_decode_state_interval": _REUSE,
    },
    "ModelConfig": {
        "check_env_func": "looks at the machine before the model is built, and may only raise",
        "update_cache_config_func": "changes the cache's configuration before the model is built, which counts",
    },
    "PreTrainedConfig": {
        "_name_or_path": "where the folder lies",
        "_commit_hash": "which revision of a hub's repository; weights are inputs of a graph",
    },
    "envs": {
        "log_file": _WATCHED,
        "enable_request_cache_usage_metric": _WATCHED,
        **{name: _WATCHED for name in vars(envs) if name.startswith(("torch_profile_", "ray_"))},
        **dict.fromkeys(
            ("dp_master_addr", "dp_master_port", "dist_master_addr", "dist_master_port"),
            "where the processes of one engine find each other",
        ),
    },
}
"""Class of a described object, or a base class -> field -> why the field cannot change a graph."""


def model_identity(model: torch.nn.Module, **contexts: Any) -> str:
    """Return a text with all that a model's graphs depend on: code, configurations, and the weights' dtypes and sizes.

    contexts: name -> LMDeploy's object (the build context, and the configurations of model, cache and backend). Values
    of weights are not included, because weights are inputs of the graphs. So checkpoints that differ only in values
    share graphs.
    """
    weights = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    layers = {type(module) for module in model.modules()}
    described = _Description()
    lines = [f"lmdeploy {lmdeploy_version}", f"transformers {transformers.__version__}"]
    for name, context in sorted(contexts.items()):
        lines += described.lines(name, context)
    lines += [f"lmdeploy.pytorch.envs.{name} = {value!r}" for name, value in _switches()]
    lines += sorted(_name(layer) for layer in layers)
    lines.append(_sources(described.modules | {layer.__module__ for layer in layers}))
    lines += [f"{name} {t.dtype} {tuple(t.shape)} {t.stride()}" for name, t in weights]
    return "\n".join(lines)


def _switches() -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of LMDeploy's environment settings that may change the result of a layer."""
    for name, value in sorted(vars(envs).items()):
        if name in LEFT_OUT["envs"] or name.startswith("_"):
            continue
        if isinstance(value, bool | int | float | str | list | set | None):
            yield name, sorted(value) if isinstance(value, set) else value


def _sources(modules: set[str]) -> str:
    """Return a hash of the source files of ``modules``.

    A version would not be enough, because remote code and custom module maps have none.
    """
    files = sorted({getattr(sys.modules.get(name), "__file__", None) or "" for name in modules} - {""})
    return hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in files)).hexdigest()


def _name(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"


class _Description:
    """Describes objects as lines of text. Objects with equal contents have equal lines, in any process.

    modules: names of the modules that define the classes and functions described so far.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._open: dict[int, str] = {}

    def lines(self, path: str, value: Any) -> Iterator[str]:
        """Yield one line ``path = value`` for a plain value, or lines for all parts of a composite value.

        path: the value's name, such as ``model_config.dtype``.
        """
        plain = _plain(value)
        # From CPython 3.14 on, a partial is a routine too.
        if isinstance(value, type) or (inspect.isroutine(value) and not isinstance(value, partial)):
            self.modules.add(value.__module__)
            plain = _name(value)
        if plain is not None:
            yield f"{path} = {plain}"
            return
        if id(value) in self._open:  # the value contains itself
            yield f"{path} is {self._open[id(value)]}"
            return
        self._open[id(value)] = path
        yield from self._composite(path, value)
        del self._open[id(value)]

    def _composite(self, path: str, value: Any) -> Iterator[str]:
        if isinstance(value, partial):
            yield from self.lines(f"{path}.partial", (value.func, value.args, value.keywords))
        elif isinstance(value, Mapping):
            yield f"{path}: {len(value)} items"
            for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
                yield from self.lines(f"{path}[{key!r}]", item)
        elif isinstance(value, list | tuple):
            yield f"{path}: {type(value).__name__} of {len(value)}"
            for index, item in enumerate(value):
                yield from self.lines(f"{path}[{index}]", item)
        elif isinstance(value, torch.Tensor | numpy.ndarray):
            yield f"{path} = {value.dtype} {tuple(value.shape)} {_content(value)}"
        elif isinstance(value, set | frozenset):
            yield f"{path}: {sorted(map(repr, value))}"
        else:
            yield from self._object(path, value)

    def _object(self, path: str, value: Any) -> Iterator[str]:
        self.modules.add(type(value).__module__)
        yield f"{path}: {_name(type(value))}"
        state: Any = object.__getstate__(value)  # attributes, and those in slots
        if state is None and not hasattr(value, "__dict__"):
            # Python does not show what the value holds, so this start must not reuse graphs of another start.
            logger.warning(
                "graphs are recompiled at each start, because the contents of %s (%s) cannot be inspected",
                path,
                type(value),
            )
            yield f"{path} = {os.urandom(16).hex()}"
            return
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        left_out = {name for base in type(value).__mro__ for name in LEFT_OUT.get(base.__name__, ())}
        for name, item in sorted(((attributes or {}) | slots).items()):
            if name not in left_out:
                yield from self.lines(f"{path}.{name}", item)


def _content(value: torch.Tensor | numpy.ndarray) -> str:
    tensor = torch.as_tensor(value).detach().cpu().contiguous()
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _plain(value: Any) -> str | None:
    """Return a plain value as text; None if the value is composite, a function or a class."""
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | Path):
        return repr(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return None
