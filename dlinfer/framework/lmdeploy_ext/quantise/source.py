"""Reads a model folder's configuration and the headers of its weight files, and chooses the weights to quantise."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import check_model_folder
from dlinfer.framework.lmdeploy_ext.checks.model.support import architectures, check_support, quantisation_of
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.conversion.formats import Format
from dlinfer.framework.lmdeploy_ext.conversion.model_files import DTYPES, FLOATING, Stored
from dlinfer.framework.lmdeploy_ext.errors import QuantisationSourceError

_ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
LAYERS = (*_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""The linear layers that are quantised, in each decoder layer. All other tensors are copied."""

ADMITTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
"""LMDeploy's model classes that can be quantised."""

INDEX = "model.safetensors.index.json"
_IN_FLOATS = "use the floating-point checkpoint that it was made from"
# Other forms of the same weights, which must not lie beside the quantised weights.
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Source:
    """A model folder that can be quantised.

    config: the contents of config.json.
    tensors: name -> file, dtype and shape.
    quantised: names of the weights to quantise.
    files: other files of the folder, which are copied.
    sharded: whether the folder has an index of weight files.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    quantised: frozenset[str]
    files: tuple[Path, ...]
    sharded: bool

    @functools.cached_property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def quantised_nbytes(self) -> int:
        """The size in bytes of the weights to quantise, before quantisation."""
        return sum(self.tensors[name].nbytes for name in self.quantised)

    @property
    def shards(self) -> list[str]:
        """The names of the weight files, sorted."""
        return sorted({tensor.file for tensor in self.tensors.values()})


def read(folder: Path, form: Format) -> Source:
    """Check that a model folder can be quantised, and return its description. Reads no weight.

    Raises ModelFolderError for an incomplete folder. Raises QuantisationSourceError for weights that the format cannot
    store. Raises UnsupportedFeatureError if the model's class is not in ``ADMITTED``, or if LMDeploy could not serve
    the quantised model.
    """

    def require(is_fit: Any, detail: str, advice: str) -> None:
        if not is_fit:
            raise refusal(folder, form, detail, advice)

    config = model_files.readable_config(folder)
    for _, stored in quantisation_of(config):
        method = stored.get("quant_method", "unknown") if isinstance(stored, dict) else "unknown"
        require(False, f"it is already quantised ({method})", _IN_FLOATS)
    names = architectures(config)
    for name in names:
        if name not in ADMITTED:
            feature = f"quantising {name} (supported are the dense decoders {', '.join(ADMITTED)})"
            advice = "use a checkpoint that is already quantised, or another tool (docs/guides/quantise.md)"
            raise unsupported(feature, advice)
    check_model_folder(folder)
    require(
        names,
        "its config.json names no architecture",
        "add the model's class to architectures in config.json",
    )
    weights = model_files.index_or_file(folder) or ""
    again = "save the model again with transformers"
    require("safetensors" in weights, "its weights are pickle files, not safetensors", again)
    for path in model_files.weight_files(folder):  # the result's files get the same names
        shard = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
        is_beside = "/" not in shard and path.suffix == ".safetensors"
        require(is_beside, f"its index names {shard!r}, which is not a safetensors file in the folder", again)
    tensors = {tensor.name: tensor for tensor in model_files.read(folder)}
    for tensor in tensors.values():
        detail = f"{tensor.name} has the unsupported dtype {tensor.dtype}"
        require(tensor.dtype in DTYPES, detail, "save the model in bfloat16")
    layers = range(int(config.get("num_hidden_layers") or 0))
    quantised = [f"model.layers.{layer}.{part}.weight" for layer in layers for part in LAYERS]
    missing = [name for name in quantised if name not in tensors]
    detail = (
        f"it lacks {missing[0]} ({len(missing)} such tensors)" if missing else "it has no num_hidden_layers"
    )
    whole = "use a complete checkpoint of the language model, without adapters and with separate projections"
    require(quantised and not missing, detail, whole)
    owners = {name.removesuffix(".weight") for name in quantised}
    for name in tensors:
        owner, _, part = name.rpartition(".")  # an already quantised weight comes with scales
        is_float = owner not in owners or part in ("weight", "bias")
        require(is_float, f"it has {name} beside a weight, as quantised checkpoints do", _IN_FLOATS)
    smaller = "a smaller --group-size, or w8a8" if form.name == "awq-int4" else "awq-int4 or w8a8"
    for tensor in (tensors[name] for name in quantised):
        is_float = tensor.dtype in FLOATING
        require(is_float, f"it is already quantised: {tensor.name} has dtype {tensor.dtype}", _IN_FLOATS)
        is_matrix = len(tensor.shape) == 2 and tensor.elements
        shape = f"{tensor.name} has shape {list(tensor.shape)}, which is not a matrix"
        require(is_matrix, shape, "use the checkpoint as transformers saved it")
        fault = form.fault(*tensor.shape)
        require(not fault, f"{tensor.name}: {fault}", f"use {smaller}")
    check_support(written_config(config, form))
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    others = tuple(path for path in files if path.name != "config.json" and not path.name.endswith(_WEIGHTS))
    return Source(folder, config, tensors, frozenset(quantised), others, weights == INDEX)


def refusal(folder: Path, form: Format, detail: str, advice: str) -> QuantisationSourceError:
    return QuantisationSourceError(path=str(folder), form=form.name, detail=detail, advice=advice)


def unsupported(feature: str, advice: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature=feature, where="dlinfer quantise", advice=advice)


def written_config(config: dict[str, Any], form: Format) -> dict[str, Any]:
    """Return the quantised model's config.json. config: the original model's."""
    written = config | {"quantization_config": form.config()}
    if form.dtype is not None:
        # transformers before 5 writes torch_dtype.
        name = "torch_dtype" if "torch_dtype" in config else "dtype"
        written[name] = form.dtype
    return written
