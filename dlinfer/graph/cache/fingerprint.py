"""The environment that compiled code depends on: versions, the loaded code, the CPU, and settings."""

import functools
import os
import platform
import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import dlinfer
from dlinfer import settings
from dlinfer.graph.cache.sources import CodeChangedError, LoadedCode
from dlinfer.graph.ir.global_state import GlobalState
from dlinfer.vendor import discovery

ISA_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_MAX_CPU_ISA",
    "DNNL_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "OPENBLAS_CORETYPE",
)
"""Environment variables that choose a library's instruction set, or permit the library to compute less precisely.

A library reads each variable once in a process, and so does this module."""

UNKEYED_SETTINGS = frozenset(
    {
        *(
            "cache_dir",
            "debug",
            "sophgo_timeout",
            "cpu_kv_cache_gib",
            "cpu_prompt_seconds",
            "cpu_step_seconds",
        ),
        *("max_requests", "request_seconds", "prompt_lookup_min", "prompt_lookup_max"),
    }
)
"""Settings that no compiled code depends on. Every other setting is part of every key."""

OPTION_SETTINGS = frozenset({"engine", "engine_options", "fallback", "small_regions", "vendor"})
"""Settings that only give defaults of options or choose the vendor. A key holds the options and vendors themselves."""

_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True)
class Environment:
    """Everything outside the graph that compiled code depends on. Stored code may be used only in an equal environment.

    dlinfer: dlinfer's version, and the digest of its loaded code.
    vendors: name of a vendor -> the origin of its code. For a plug-in, the origin includes a version and a code digest.
    machine: the processor architecture.
    cpu: the CPU's flags.
    cpu_model: the CPU's name; libraries choose kernels by it.
    isa: the instruction set that torch uses.
    forced_isa: the variables of ISA_VARIABLES that are set -> their values.
    threads: torch's thread count.
    torch_state: the settings of torch that a capture or a compilation reads.
    settings: dlinfer's settings.
    """

    python: str
    torch: str
    dlinfer: str
    vendors: Mapping[str, str]
    machine: str
    cpu: str
    cpu_model: str
    isa: str
    forced_isa: Mapping[str, str]
    threads: int
    torch_state: Mapping[str, object]
    settings: Mapping[str, object]
    changed: str
    """Names of loaded modules whose files changed on disk; empty if none did. If not empty, no cache may be used."""


def environment(vendors: Iterable[str] = ()) -> Environment:
    """Return the current environment. vendors: names of the vendors whose code matters."""
    changed: list[str] = []
    own = _digest(Path(dlinfer.__file__).parent, "dlinfer", dlinfer.LOADED_AT, changed)
    return Environment(
        python=platform.python_version(),
        torch=f"{torch.__version__} {torch.version.git_version}",
        dlinfer=f"{dlinfer.__version__} {own}",
        vendors={name: _vendor(name, changed) for name in sorted(set(vendors))},
        machine=platform.machine(),
        cpu=cpu_flags(),
        cpu_model=cpu_model(),
        isa=torch.backends.cpu.get_cpu_capability(),
        forced_isa=_forced_isa(),
        threads=torch.get_num_threads(),
        torch_state={
            **asdict(GlobalState.now()),
            "float32_matmul": torch.get_float32_matmul_precision(),
            "mkldnn": torch.backends.mkldnn.enabled,
        },
        settings={
            name: value
            for name, value in asdict(settings.current()).items()
            if name not in UNKEYED_SETTINGS | OPTION_SETTINGS
        },
        changed="; ".join(changed),
    )


def cpu_flags() -> str:
    """Return this CPU's instruction-set extensions as Linux lists them; on other systems, the CPU's name."""
    info = _cpuinfo()
    return " ".join(sorted(info.get("flags", info.get("Features", "")).split())) or platform.processor()


_MODEL = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")


def cpu_model() -> str:
    """Return Linux's name of this CPU, with family, model and stepping; on other systems, Python's name of it."""
    info = _cpuinfo()
    return ", ".join(f"{name} {info[name]}" for name in _MODEL if name in info) or platform.processor()


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Return Linux's description of the first CPU, by field; empty on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


_loaded_code = functools.cache(LoadedCode)


def _digest(root: Path, module: str, loaded_at: int, changed: list[str]) -> str:
    """Return the digest of loaded code. root, module, loaded_at: see ``LoadedCode``.

    If a file changed since it was loaded, append the reason to ``changed``, and return a text that is unique to this
    process. Then no other process finds this process's entries.
    """
    try:
        return _loaded_code(root, module, loaded_at).digest()
    except CodeChangedError as error:
        changed.append(str(error))
        return f"of process {_PROCESS}"


def _vendor(name: str, changed: list[str]) -> str:
    """Return the origin of a vendor's code. For a plug-in, the origin is its distribution, version and code digest.

    changed: gets the reason if a file of the plug-in changed since it was loaded.
    """
    origin = discovery.origin(name)
    if origin is None:
        return "registered by hand"
    if origin.module.partition(".")[0] == "dlinfer":
        return "dlinfer"
    module = sys.modules[origin.module]
    # A plug-in's code is the package of its entry point, or the module's one file if it has no package.
    path, package = Path(module.__file__ or ""), module.__package__
    root = path.parent if package else path
    digest = _digest(root, package or module.__name__, origin.loaded_at, changed)
    return f"{origin.distribution} {origin.version} {digest}"


@functools.cache
def _forced_isa() -> dict[str, str]:
    return {name: os.environ[name] for name in ISA_VARIABLES if os.environ.get(name)}
