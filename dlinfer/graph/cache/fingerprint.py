"""What a compiled thing depends on besides what was compiled: versions, code as it was loaded, the CPU, settings."""

import functools
import os
import platform
import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

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
"""What users force the instruction set of a library with, or let it round more with. Libraries read them once, so they
are read once here."""

UNKEYED_SETTINGS = frozenset({"cache_dir", "cpu_kv_cache_gib", "debug", "sophgo_timeout"})
"""Settings that no compiled thing depends on; a setting that is not named here is part of every key."""

OPTION_SETTINGS = frozenset({"engine", "engine_options", "fallback", "small_regions", "vendor"})
"""Settings that only stand in for options that are not given: keys have the options, and the vendors, themselves."""

_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True)
class Environment:
    """Where a compiled thing is right, and fast.

    dlinfer: version and digest of the code as it was loaded. vendors: name -> where it is from; the version and the
    digest of the code of one that is no part of dlinfer. cpu: the flags of the CPU. cpu_model: which one it is, since
    libraries choose kernels by it. isa: what torch uses of the flags; forced_isa: variables that lower it. threads: of
    torch. torch_state: settings of torch that a capture or a compilation reads. settings: of dlinfer.
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
    torch_state: Mapping[str, Any]
    settings: Mapping[str, Any]
    changed: str
    """Why nothing may be stored or taken: the file of a loaded module that changed on disk. Empty where none did."""


def environment(vendors: Iterable[str] = ()) -> Environment:
    """The environment of now, in which the vendors of these names matter."""
    changed: list[str] = []
    return Environment(
        python=platform.python_version(),
        torch=f"{torch.__version__} {torch.version.git_version}",
        dlinfer=f"{dlinfer.__version__} {_digest(_own_code(), changed)}",
        vendors={name: _vendor(name, changed) for name in sorted(set(vendors))},
        machine=platform.machine(),
        cpu=cpu_flags(),
        cpu_model=cpu_model(),
        isa=torch.backends.cpu.get_cpu_capability(),
        forced_isa=_forced_isa(),
        threads=torch.get_num_threads(),
        torch_state=_torch_state(),
        settings=_settings(),
        changed="; ".join(changed),
    )


@functools.cache
def cpu_flags() -> str:
    """The instruction-set extensions of this CPU, as the kernel lists them; its name elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor()


_MODEL = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")


@functools.cache
def cpu_model() -> str:
    """What the kernel calls this CPU, with the numbers that tell two of one name apart; its name elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    pairs = [
        (name.strip(), value.strip()) for name, _, value in (one.partition(":") for one in first.splitlines())
    ]
    return ", ".join(f"{name} {value}" for name, value in pairs if name in _MODEL) or platform.processor()


@functools.cache
def _own_code() -> LoadedCode:
    return LoadedCode(Path(dlinfer.__file__).parent, "dlinfer", dlinfer.LOADED_AT)


def _digest(code: LoadedCode, changed: list[str]) -> str:
    """The digest of loaded code; one of this process alone, and a reason more, where nobody can tell it."""
    try:
        return code.digest()
    except CodeChangedError as error:
        changed.append(str(error))
        return f"of process {_PROCESS}"


def _vendor(name: str, changed: list[str]) -> str:
    """What identifies a vendor's code."""
    origin = discovery.origin(name)
    if origin is None:
        return "registered by hand"
    if origin.module.partition(".")[0] == "dlinfer":
        return "dlinfer"
    return f"{origin.distribution} {origin.version} {_digest(_plugin_code(origin), changed)}"


@functools.cache
def _plugin_code(origin: discovery.Origin) -> LoadedCode:
    """The code of the package that a plugin's entry point lies in; the one file of a module that lies in none."""
    module = sys.modules[origin.module]
    package = module.__package__ or module.__name__
    path = Path(module.__file__ or "")
    return LoadedCode(path.parent if module.__package__ else path, package, origin.loaded_at)


@functools.cache
def _forced_isa() -> dict[str, str]:
    return {name: os.environ[name] for name in ISA_VARIABLES if os.environ.get(name)}


def _torch_state() -> dict[str, Any]:
    return {
        **asdict(GlobalState.now()),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def _settings() -> dict[str, Any]:
    chosen = settings.current()
    names = [item.name for item in fields(chosen)]
    return {name: getattr(chosen, name) for name in names if name not in UNKEYED_SETTINGS | OPTION_SETTINGS}
