"""The whole preflight of one folder."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import DlinferError, ModelMemoryError
from dlinfer.framework.lmdeploy_ext.checks.folder import weight_checks
from dlinfer.framework.lmdeploy_ext.checks.folder.model_checks import check_model_folder, in_short
from dlinfer.framework.lmdeploy_ext.checks.model.model_support import architectures, quantisation_of
from dlinfer.framework.lmdeploy_ext.checks.options import session_length
from dlinfer.framework.lmdeploy_ext.conversion import headers
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM
from dlinfer.framework.lmdeploy_ext.conversion.loading import gives_back, has_other_bytes
from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.lmdeploy_ext.device.kv_memory import gib
from dlinfer.framework.lmdeploy_ext.preflight import model
from dlinfer.framework.lmdeploy_ext.preflight.memory import Plan, logits_bytes, prefill_bytes
from dlinfer.ops.core.kernels import kernel_authors
from dlinfer.vendor import activate_default

SCHEMA = 1

RUNNING = 60 << 20
"""Bytes of a running engine beyond its imports: threads, tokenizer. Measured: docs/guides/preflight.md."""

GRAPHS = 70 << 20
"""Bytes that compiling graphs takes beyond that, the compiler included; not in eager mode."""


@dataclass(frozen=True)
class Refusal:
    """Something that would be refused. error: the class of the error. text: what it says. next_step: what to do."""

    error: str
    text: str
    next_step: str


@dataclass(frozen=True)
class OpServed:
    """An op that the model's layers call. vendor: whose kernel answers it; ``reference`` where none does, and why."""

    op: str
    vendor: str
    reason: str


@dataclass(frozen=True)
class Memory:
    """The plan, in bytes, but for blocks and tokens.

    process, graphs, weights, mapped, kv_cache, activations, logits: see ``memory.Plan``. peak: the most at once.
    needed: what has to be free for it, beyond this process. free, source: what is, and who says so.
    stored: bytes of the weights in their files. kv_token: of one token over all layers. kv_blocks, block_size: of the
        cache. prefill_tokens: of one prefill.
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
    """All that preflight says. What could not be found out, since the folder is refused before, is empty or null.

    fits: nothing is refused. architectures: of config.json. model_class: LMDeploy's. dtype: that of loaded weights.
    quantisation: the method, or empty. plain: what computes layers in plain torch.
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
    """Look at a folder as an engine with these options of PytorchEngineConfig would. Loads LMDeploy, and no weight.

    trust_remote_code: as LMDeploy's; whether a configuration's code in the folder may be run.
    """
    refusals: list[Refusal] = []
    built, plan = None, None
    with _noted(refusals):
        engine = model.engine_config(device, **options)
        check_model_folder(folder, trust_remote_code)
        built = model.build(folder, engine, trust_remote_code)
        session_length.check_config(built.config.llm_config or built.config.hf_config, engine.session_len)
        weight_checks.check(built.module, folder)
    if built is not None:
        with _noted(refusals):
            plan = _memory(folder, built)
    config = _config(folder)
    return Report(
        schema=SCHEMA,
        folder=str(folder),
        device=device,
        fits=not refusals,
        architectures=list(dict.fromkeys(architectures(config))),
        model_class=_class_name(built.module) if built is not None else "",
        dtype=str(built.config.dtype).removeprefix("torch.") if built is not None else "",
        quantisation=_method(config) or (_packed_as(built.config) if built is not None else ""),
        refusals=refusals,
        ops=list(_served(built.ops, device)) if built is not None else [],
        plain=built.plain if built is not None else [],
        memory=plan,
    )


@contextmanager
def _noted(refusals: list[Refusal]) -> Iterator[None]:
    """Note an error instead of raising it: ours as it is, LMDeploy's and transformers' in short."""
    try:
        yield
    except DlinferError as error:
        refusals.append(Refusal(type(error).__name__, error.explanation, error.step))
    except Exception as error:  # noqa: BLE001 - whatever LMDeploy meets in a folder is the finding
        text = f"LMDeploy cannot build the model: {in_short(error)}"
        refusals.append(Refusal(type(error).__name__, text, "repair the configuration, or use another model"))


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}  # refused already
    return found if isinstance(found, dict) else {}


def _class_name(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _served(ops: list[str], device: str) -> Iterator[OpServed]:
    vendor = activate_default(devices.torch_device(device))
    authors = kernel_authors(vendor) if vendor is not None else {}
    for op in ops:
        if op in authors:
            yield OpServed(op, authors[op], "")
        else:
            reason = (
                f"vendor {vendor.name!r} has no kernel for it"
                if vendor is not None
                else "no vendor serves it"
            )
            yield OpServed(op, "reference", reason)


def _memory(folder: Path, built: model.Built) -> Memory:
    """Raises MemoryPlanError, by the adaptor's own planner, and InsufficientMemoryError."""
    available = activation.device().memory()
    process, free = resident() + RUNNING, available.available
    tensors = headers.read(folder)
    tied = bool(built.config.tie_word_embeddings)
    stored = (
        0
        if built.packs_head or has_other_bytes(folder)
        else headers.loaded_bytes(tensors, built.config.dtype.itemsize, tied)
    )
    packing = built.bf12_packing
    weights = (stored or built.weight_bytes) - (packing.saved_bytes if packing is not None else 0)
    graphs = 0 if built.engine.eager_mode else GRAPHS
    beside = weights + RUNNING + graphs
    if beside > free:
        raise _too_large(weights, free, available.source)
    blocks, tokens = model.kv_blocks(built, free - beside)
    shape, rows = built.shape, built.cache.max_batches
    plan = Plan(
        process=process,
        graphs=graphs,
        weights=weights,
        mapped=_mapped(folder, tensors, packing),
        kv_cache=blocks * built.block_bytes,
        activations=prefill_bytes(shape, tokens),
        logits=logits_bytes(shape, rows),
    )
    needed = plan.needed - resident()
    if needed > free:
        raise _too_large(needed, free, available.source)
    return Memory(
        process=plan.process,
        graphs=plan.graphs,
        weights=plan.weights,
        mapped=plan.mapped,
        kv_cache=plan.kv_cache,
        activations=plan.activations,
        logits=plan.logits,
        peak=plan.peak,
        needed=needed,
        free=free,
        source=available.source,
        stored=sum(one.nbytes for one in tensors),
        kv_token=built.block_bytes // built.cache.block_size,
        kv_blocks=blocks,
        block_size=built.cache.block_size,
        prefill_tokens=tokens,
    )


def _mapped(folder: Path, tensors: list[headers.Stored], packing: Any) -> int:
    """Bytes beside the weights while they load: of files, and of a weight that is whole before it becomes BF12."""
    is_given_back = gives_back(folder) or (packing is not None and packing.gives_back)
    files = headers.largest_tensor(tensors) if is_given_back else headers.largest_file(folder)
    return files + (packing.largest_weight if packing is not None else 0)


def _too_large(needed: int, free: int, source: str) -> DlinferError:
    return ModelMemoryError(needed=gib(needed), free=gib(free), source=source)


def resident() -> int:
    """Bytes of this process that are in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _packed_as(config: Any) -> str:
    """How weights in floats are packed while they load, as LMDeploy and the setting say; empty where they are not."""
    found = getattr(config.hf_config, "quantization_config", None) or {}
    return f"{found['quant_method']} (of {found[CONVERTED_FROM]})" if CONVERTED_FROM in found else ""


def _method(config: dict[str, Any]) -> str:
    """How the weights are quantised; empty where they are not."""
    found = next((one for _, one in quantisation_of(config)), None)
    return (
        ""
        if found is None
        else str(found.get("quant_method", "unknown"))
        if isinstance(found, dict)
        else "unknown"
    )
