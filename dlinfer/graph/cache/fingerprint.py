"""The environment that compiled code depends on: versions, code as it was loaded, the CPU, settings."""

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
"""Variables that force a library's instruction set or let it round more. Libraries read them once, and so do we."""

UNKEYED_SETTINGS = frozenset({"cache_dir", "cpu_kv_cache_gib", "debug", "sophgo_timeout"})
"""Settings that no compiled code depends on. Every other setting is part of every key."""

OPTION_SETTINGS = frozenset({"engine", "engine_options", "fallback", "small_regions", "vendor"})
"""Settings that are defaults of options. Keys hold the options, and the vendors, themselves."""

_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True)
class Environment:
    """Where compiled code is right, and fast.

    dlinfer: version and digest of the code as it was loaded. vendors: name -> its origin, with version and code digest
    where it is a plug-in. cpu: the flags of the CPU. cpu_model: its name; libraries choose kernels by it.
    isa: the instruction set that torch uses; forced_isa: variables that lower it. threads: of torch.
    torch_state: settings of torch that a capture or a compilation reads. settings: of dlinfer.
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
    """Which loaded module's file changed on disk, so that no cache may be used. Empty where none did."""


def environment(vendors: Iterable[str] = ()) -> Environment:
    """The current environment. vendors: the names of those whose code matters."""
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
    """The instruction-set extensions of this CPU, as the kernel lists them; its name elsewhere."""
    info = _cpuinfo()
    return " ".join(sorted(info.get("flags", info.get("Features", "")).split())) or platform.processor()


_MODEL = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")


def cpu_model() -> str:
    """The kernel's name of this CPU, with the numbers that distinguish two of one name; Python's name elsewhere."""
    info = _cpuinfo()
    return ", ".join(f"{name} {info[name]}" for name in _MODEL if name in info) or platform.processor()


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Linux's description of the first CPU; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


_loaded_code = functools.cache(LoadedCode)


def _digest(root: Path, module: str, loaded_at: int, changed: list[str]) -> str:
    """The digest of loaded code. Where a file changed: one of this process alone, and the reason in ``changed``."""
    try:
        return _loaded_code(root, module, loaded_at).digest()
    except CodeChangedError as error:
        changed.append(str(error))
        return f"of process {_PROCESS}"


def _vendor(name: str, changed: list[str]) -> str:
    """Where a vendor's code comes from, with its version."""
    origin = discovery.origin(name)
    if origin is None:
        return "registered by hand"
    if origin.module.partition(".")[0] == "dlinfer":
        return "dlinfer"
    module = sys.modules[origin.module]
    # The package around a plug-in's entry point, or its one file where it has no package.
    path, package = Path(module.__file__ or ""), module.__package__
    root = path.parent if package else path
    digest = _digest(root, package or module.__name__, origin.loaded_at, changed)
    return f"{origin.distribution} {origin.version} {digest}"


@functools.cache
def _forced_isa() -> dict[str, str]:
    return {name: os.environ[name] for name in ISA_VARIABLES if os.environ.get(name)}
