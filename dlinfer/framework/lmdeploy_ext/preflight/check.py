"""Runs the preflight of one model folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlinfer.errors import DlinferError, ModelMemoryError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import check_model_folder
from dlinfer.framework.lmdeploy_ext.checks.model import weights
from dlinfer.framework.lmdeploy_ext.checks.model.support import architectures, quantisation_of
from dlinfer.framework.lmdeploy_ext.checks.options import session_length
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM
from dlinfer.framework.lmdeploy_ext.conversion.loading import plan_of_folder
from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.lmdeploy_ext.device.kv_memory import gib
from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.lmdeploy_ext.preflight import model
from dlinfer.framework.lmdeploy_ext.preflight.memory import Plan, logits_bytes, prefill_bytes
from dlinfer.ops.core.kernels import kernel_authors
from dlinfer.vendor import activate_default

SCHEMA = 1

RUNNING = 60 << 20
"""Bytes of a running engine beyond its imports: threads, tokenizer. Measured: docs/results/memory.md."""

GRAPHS = 70 << 20
"""Bytes that compiling graphs takes, the compiler included; none in eager mode."""


@dataclass(frozen=True)
class Refusal:
    """A reason why an engine would not start. error: the class of the error. text, next_step: its two sentences."""

    error: str
    text: str
    next_step: str


@dataclass(frozen=True)
class OpServed:
    """An op that the model's layers call. vendor: the author of its kernel; ``reference`` where there is none, for a
    ``reason``."""

    op: str
    vendor: str
    reason: str


@dataclass(frozen=True)
class Memory:
    """The memory that an engine would take, in bytes, and the sizes behind it.

    process, graphs, weights, mapped, kv_cache, activations, logits: see ``memory.Plan``. peak: the most at once.
    needed: bytes that must be free, beyond this process. free, source: bytes that are free, and who reports them.
    stored: bytes of the weights in their files. kv_token: bytes of one token over all layers. kv_blocks, block_size:
    blocks of the cache, and tokens of a block. prefill_tokens: tokens of one prefill.
    """

    process: int
    graphs: int
    weights: int
    mapped: int
    kv_cache: int
    activations: int
    logits: int
    peak: int
    needed: int
    free: int
    source: str
    stored: int
    kv_token: int
    kv_blocks: int
    block_size: int
    prefill_tokens: int


@dataclass(frozen=True)
class Report:
    """The findings. A field that a refusal kept preflight from finding out is empty or null.

    fits: nothing is refused. architectures: of config.json. model_class: LMDeploy's. dtype: of loaded weights.
    quantisation: the method, or empty. plain: names of the code that computes layers in plain torch.
    """

    schema: int
    folder: str
    device: str
    fits: bool
    architectures: list[str]
    model_class: str
    dtype: str
    quantisation: str
    refusals: list[Refusal] = field(default_factory=list)
    ops: list[OpServed] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    memory: Memory | None = None


def preflight(folder: Path, device: str, trust_remote_code: bool = False, **options: Any) -> Report:
    """Check a folder as an engine with these options of PytorchEngineConfig would. Loads LMDeploy, but no weight.

    trust_remote_code: whether code in the folder may run, as in LMDeploy.
    """
    refusals: list[Refusal] = []
    built, plan = None, None
    with _noted(refusals):
        engine = model.engine_config(device, **options)
        check_model_folder(folder, trust_remote_code)
        built = model.build(folder, engine, trust_remote_code)
        session_length.check_config(built.config.llm_config or built.config.hf_config, engine.session_len)
        weights.check(built.module, folder)
    if built is not None:
        with _noted(refusals):
            plan = _memory(folder, built)
    config = model_files.readable_config(folder)
    report = Report(
        schema=SCHEMA,
        folder=str(folder),
        device=device,
        fits=not refusals,
        architectures=list(dict.fromkeys(architectures(config))),
        model_class="",
        dtype="",
        quantisation=_method(config),
        refusals=refusals,
        memory=plan,
    )
    if built is None:
        return report
    return replace(
        report,
        model_class=f"{type(built.module).__module__}.{type(built.module).__name__}",
        dtype=str(built.config.dtype).removeprefix("torch."),
        quantisation=report.quantisation or _packed_as(built.config),
        ops=list(_served(built.ops, device)),
        plain=built.plain,
    )


@contextmanager
def _noted(refusals: list[Refusal]) -> Iterator[None]:
    """Note an error instead of raising it: ours in full, LMDeploy's and transformers' in short."""
    try:
        yield
    except DlinferError as error:
        refusals.append(Refusal(type(error).__name__, error.explanation, error.step))
    except Exception as error:  # noqa: BLE001 - whatever LMDeploy meets in a folder is the finding
        text = f"LMDeploy cannot build the model: {in_short(error)}"
        refusals.append(Refusal(type(error).__name__, text, "repair the configuration, or use another model"))


def _served(ops: list[str], device: str) -> Iterator[OpServed]:
    vendor = activate_default(devices.torch_device(device))
    authors = kernel_authors(vendor) if vendor is not None else {}
    missing = "no vendor serves it" if vendor is None else f"vendor {vendor.name!r} has no kernel for it"
    for op in ops:
        yield OpServed(op, authors[op], "") if op in authors else OpServed(op, "reference", missing)


def _memory(folder: Path, built: model.Built) -> Memory:
    """Raises MemoryPlanError, by the adaptor's own planner, and ModelMemoryError."""
    available = activation.device().memory()
    free, source = available.available, available.source
    tensors, converted = model_files.read(folder), plan_of_folder(folder)
    weights, packing = built.weight_bytes, built.bf12_packing
    if tensors and not built.packs_head and not (converted is not None and converted.changes_bytes):
        tied = bool(built.config.tie_word_embeddings)
        weights = model_files.loaded_bytes(tensors, built.config.dtype.itemsize, tied)
    gives_back = converted is not None and converted.packs
    if packing is not None:
        weights -= packing.saved_bytes
        gives_back = gives_back or packing.gives_back
    # A weight is whole before it is packed; the pages of its file go back tensor by tensor, or stay until it closes.
    mapped = model_files.largest_tensor(tensors) if gives_back else model_files.largest_file(folder)
    mapped += packing.largest_weight if packing is not None else 0
    graphs = 0 if built.engine.eager_mode else GRAPHS
    beside = weights + RUNNING + graphs
    if beside > free:
        raise ModelMemoryError(needed=gib(weights), free=gib(free), source=source)
    blocks, tokens = model.kv_blocks(built, free - beside)
    plan = Plan(
        process=resident() + RUNNING,
        graphs=graphs,
        weights=weights,
        mapped=mapped,
        kv_cache=blocks * built.block_bytes,
        activations=prefill_bytes(built.shape, tokens),
        logits=logits_bytes(built.shape, built.cache.max_batches),
    )
    needed = plan.needed - resident()
    if needed > free:
        raise ModelMemoryError(needed=gib(needed), free=gib(free), source=source)
    return Memory(
        **vars(plan),
        peak=plan.peak,
        needed=needed,
        free=free,
        source=source,
        stored=sum(tensor.nbytes for tensor in tensors),
        kv_token=built.block_bytes // built.cache.block_size,
        kv_blocks=blocks,
        block_size=built.cache.block_size,
        prefill_tokens=tokens,
    )


def resident() -> int:
    """Bytes of this process that are in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _packed_as(config: Any) -> str:
    """The method that packs weights in floats while they load, and the setting that asks for it; or empty."""
    stored = getattr(config.hf_config, "quantization_config", None) or {}
    return f"{stored['quant_method']} (of {stored[CONVERTED_FROM]})" if CONVERTED_FROM in stored else ""


def _method(config: dict[str, Any]) -> str:
    """The method of a quantised checkpoint, or empty."""
    for _, stored in quantisation_of(config):
        return str(stored.get("quant_method", "unknown")) if isinstance(stored, dict) else "unknown"
    return ""
