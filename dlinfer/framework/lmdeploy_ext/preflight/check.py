"""Checks one model folder as an engine would, and reports refusals, ops and memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlinfer.errors import DlinferError
from dlinfer.framework.lmdeploy_ext.checks.folder import remote_code
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import check_model_folder
from dlinfer.framework.lmdeploy_ext.checks.model import weights
from dlinfer.framework.lmdeploy_ext.checks.model.support import architectures, quantisation_of
from dlinfer.framework.lmdeploy_ext.checks.options import session_length
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM
from dlinfer.framework.lmdeploy_ext.conversion.loading import plan_of_folder
from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.lmdeploy_ext.device.kv_memory import gib
from dlinfer.framework.lmdeploy_ext.device.weight_memory import too_large
from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.lmdeploy_ext.gguf.folder import GGUF_FILE, model_folder
from dlinfer.framework.lmdeploy_ext.gguf.reader import is_gguf
from dlinfer.framework.lmdeploy_ext.preflight import model
from dlinfer.framework.lmdeploy_ext.preflight.memory import (
    GRAPHS,
    RUNNING,
    Memory,
    logits_bytes,
    prefill_bytes,
)
from dlinfer.ops.core.kernels import kernel_authors
from dlinfer.vendor import activate_default

SCHEMA = 1


@dataclass(frozen=True)
class Refusal:
    """A reason that an engine would not start.

    error: the name of the error's class. text: the error's text. next_step: the user's next step.
    """

    error: str
    text: str
    next_step: str


@dataclass(frozen=True)
class OpServed:
    """An op that the model's layers call.

    vendor: the vendor that has a kernel for the op; ``reference`` if no vendor has one.
    reason: the reason that there is no vendor's kernel; empty if there is one.
    """

    op: str
    vendor: str
    reason: str


@dataclass
class Report:
    """The findings of preflight. If a refusal ends preflight early, fields that are not known yet are empty or null.

    folder, device: the model folder and the device type that preflight was called with.
    fits: whether an engine would start, because nothing is refused.
    architectures: the class names in config.json.
    model_class: LMDeploy's model class, with its module.
    dtype: the dtype of the loaded weights.
    quantisation: the quantisation method; empty if the weights are not quantised.
    refusals: the reasons that an engine would not start.
    ops: the ops that the model's layers call.
    plain: names of the classes whose layers are computed in plain torch, without an op of ours.
    memory: the memory that an engine would take.
    """

    schema: int
    folder: str
    device: str
    fits: bool = False
    architectures: list[str] = field(default_factory=list)
    model_class: str = ""
    dtype: str = ""
    quantisation: str = ""
    refusals: list[Refusal] = field(default_factory=list)
    ops: list[OpServed] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    memory: Memory | None = None


def preflight(folder: Path, device: str, trust_remote_code: bool = False, **options: Any) -> Report:
    """Report whether an engine on ``device`` would serve a model folder. Imports LMDeploy, but loads no weights.

    device: a device type. trust_remote_code: whether Python code in the folder may run, as in LMDeploy.
    options: fields of PytorchEngineConfig.
    """
    report, built = Report(SCHEMA, str(folder), device), None
    with _noted(report.refusals):
        engine = model.engine_config(device, **options)
        if engine.tp > 1:
            raise activation.refuse(
                f"preflight with tp={engine.tp}", "leave tp out: preflight plans one process", device
            )
        if is_gguf(folder):
            folder = model_folder(folder)
        check_model_folder(folder, trust_remote_code)
        with remote_code.explained(folder, trust_remote_code):
            built = model.build(folder, engine, trust_remote_code)
        session_length.check_config(built.config.llm_config or built.config.hf_config, engine.session_len)
        weights.check(built.module, folder)
    config = model_files.readable_config(folder)
    report.architectures = list(dict.fromkeys(architectures(config)))
    report.quantisation = _method(config)
    if built is not None:
        with _noted(report.refusals):
            report.memory = _memory(folder, built)
        report.model_class = f"{type(built.module).__module__}.{type(built.module).__name__}"
        report.dtype = str(built.config.dtype).removeprefix("torch.")
        report.quantisation = report.quantisation or _packed_as(built.config)
        report.ops = list(_served(built.ops, device))
        report.plain = built.plain
    report.fits = not report.refusals
    return report


@contextmanager
def _noted(refusals: list[Refusal]) -> Iterator[None]:
    """In the ``with`` block, append an error to ``refusals`` instead of raising it.

    Errors of other libraries are shortened.
    """
    try:
        yield
    except DlinferError as error:
        refusals.append(Refusal(type(error).__name__, error.explanation, error.step))
    except Exception as error:  # noqa: BLE001 - whatever LMDeploy meets in a folder is the finding
        text = f"LMDeploy cannot build the model: {in_short(error)}"
        refusals.append(Refusal(type(error).__name__, text, "correct config.json, or use another model"))


def _served(ops: list[str], device: str) -> Iterator[OpServed]:
    vendor = activate_default(devices.torch_device(device))
    authors = kernel_authors(vendor) if vendor is not None else {}
    missing = (
        "no vendor has a kernel for it" if vendor is None else f"vendor {vendor.name!r} has no kernel for it"
    )
    for op in ops:
        yield OpServed(op, authors[op], "") if op in authors else OpServed(op, "reference", missing)


def _memory(folder: Path, built: model.Built) -> Memory:
    """Return the memory that an engine would take. Raises MemoryPlanError or ModelMemoryError if too little is free."""
    available = activation.device().memory()
    config, cache, packing = built.config, built.cache, built.packing
    tensors, converted = model_files.read(folder), plan_of_folder(folder)
    weights = built.weight_bytes
    of_gguf = hasattr(config.hf_config, GGUF_FILE)  # the layers' sizes are known, and what stays in blocks
    if (
        tensors
        and not of_gguf
        and not built.packs_head
        and not (converted is not None and converted.changes_bytes)
    ):
        weights = model_files.loaded_bytes(tensors, config.dtype.itemsize, bool(config.tie_word_embeddings))
    gives_back = of_gguf or (converted is not None and converted.packs)
    if packing is not None:
        weights -= packing.saved_bytes
        gives_back = gives_back or packing.gives_back
    # A weight is in memory as a whole before it is packed. The pages of a weight file are given back tensor by tensor,
    # or stay resident until the file is closed.
    mapped = model_files.largest_tensor(tensors) if gives_back else model_files.largest_file(folder)
    mapped += packing.largest_weight if packing is not None else 0
    graphs = 0 if built.engine.eager_mode else GRAPHS
    beside = weights + RUNNING + graphs
    if beside > available.available:
        raise too_large(gib(weights), available)
    blocks, tokens = model.kv_blocks(built, available.available - beside)
    memory = Memory(
        process=_resident() + RUNNING,
        graphs=graphs,
        weights=weights,
        mapped=mapped,
        kv_cache=blocks * built.block_bytes,
        activations=prefill_bytes(tokens, built.widest, config.dtype.itemsize),
        logits=logits_bytes(cache.max_batches, config.vocab_size, config.dtype.itemsize),
        free=available.available,
        source=available.source,
        stored=sum(tensor.nbytes for tensor in tensors),
        kv_token=built.block_bytes // cache.block_size,
        kv_blocks=blocks,
        block_size=cache.block_size,
        prefill_tokens=tokens,
    )
    if memory.needed > memory.free:
        raise too_large(gib(memory.needed), available)
    return memory


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _packed_as(config: Any) -> str:
    """Return a text with the method that packs floating-point weights while they load, and the user's setting for it.

    The text is empty if no weights are packed. config: LMDeploy's ModelConfig.
    """
    stored = getattr(config.hf_config, "quantization_config", None) or {}
    return f"{stored['quant_method']} (of {stored[CONVERTED_FROM]})" if CONVERTED_FROM in stored else ""


def _method(config: dict[str, Any]) -> str:
    """Return the ``quant_method`` of a checkpoint; empty if it is not quantised. config: config.json as a dict."""
    for _, stored in quantisation_of(config):
        return str(stored.get("quant_method", "unknown")) if isinstance(stored, dict) else "unknown"
    return ""
