"""What a folder holds, and what of it is quantised: told from its configuration and headers, and no weight is read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.folder.model_checks import check_model_folder
from dlinfer.framework.lmdeploy_ext.checks.model.model_support import (
    architectures,
    check_support,
    quantisation_of,
)
from dlinfer.framework.lmdeploy_ext.conversion.formats import Format
from dlinfer.framework.lmdeploy_ext.conversion.headers import BITS, Stored
from dlinfer.framework.lmdeploy_ext.errors import QuantisationSourceError

_ATTENTION = tuple(f"self_attn.{one}_proj" for one in "qkvo")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

ADMITTED: Mapping[str, tuple[str, ...]] = {
    "LlamaForCausalLM": (*_ATTENTION, *_GATED),
    "Qwen2ForCausalLM": (*_ATTENTION, *_GATED),
    "Qwen3ForCausalLM": (*_ATTENTION, *_GATED),
    "MistralForCausalLM": (*_ATTENTION, *_GATED),
}
"""Class -> the linear layers of each of its decoder's layers, which are quantised. Everything else is kept."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATING = ("F64", "F32", "F16", "BF16")
# Other forms of the same weights, which the folder that is written must not have beside its own.
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Source:
    """A folder that can be quantised.

    config: its config.json. tensors: name -> where it is, in which dtype and shape. quantised: names of the weights
    that are. files: its other files, which are copied. sharded: whether there is an index.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    quantised: frozenset[str]
    files: tuple[Path, ...]
    sharded: bool

    @property
    def shards(self) -> list[str]:
        """Names of the weight files."""
        return sorted({one.file for one in self.tensors.values()})


def read(folder: Path, form: Format) -> Source:
    """Look at a folder. Reads no weight.

    Raises ModelFolderError for a folder that is not whole, UnsupportedFeatureError for a class that is not admitted and
    for what LMDeploy would not read, and QuantisationSourceError for weights that the format cannot take.
    """

    def refuse(detail: str, advice: str) -> QuantisationSourceError:
        return QuantisationSourceError(path=str(folder), form=form.name, detail=detail, advice=advice)

    config = _config(folder)
    for _, found in quantisation_of(config):
        method = found.get("quant_method", "unknown") if isinstance(found, dict) else "unknown"
        raise refuse(
            f"it is quantised already ({method})", "give the checkpoint in floats that it was made of"
        )
    names = architectures(config)
    _check_class(names)
    check_model_folder(folder)
    if not names:
        raise refuse("its config.json names no architecture", "name the class in architectures")
    sharded = not (folder / SINGLE).is_file()
    if sharded and not (folder / INDEX).is_file():
        raise refuse("its weights are pickled", "save the model again with transformers, as safetensors")
    tensors = _tensors(folder, sharded)
    for shard in {one.file for one in tensors.values()}:  # it names a file that is written, too
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise refuse(f"its index names a file {shard!r}", "save the model again with transformers")

    strange = next((one for one in tensors.values() if one.dtype not in BITS), None)
    if strange is not None:
        raise refuse(f"{strange.name} has dtype {strange.dtype}", "save the model in bfloat16")
    expected = [
        f"model.layers.{layer}.{part}.weight"
        for layer in range(int(config.get("num_hidden_layers") or 0))
        for part in ADMITTED[names[0]]
    ]
    missing = [name for name in expected if name not in tensors]
    if missing or not expected:
        what = (
            f"it has no {missing[0]} ({len(missing)} such)" if missing else "num_hidden_layers is not there"
        )
        raise refuse(
            what, "give a whole checkpoint of the language model, without adapters, its layers unmerged"
        )
    of_layers = {name.removesuffix(".weight") for name in expected}
    for name in tensors:
        layer, _, part = name.rpartition(".")
        if layer in of_layers and part not in (
            "weight",
            "bias",
        ):  # scales of a weight that is quantised, mostly
            raise refuse(
                f"it has {name} beside a weight", "give the checkpoint in floats that it was made of"
            )
    _check_weights({name: tensors[name] for name in expected}, form, refuse)
    check_support(written_config(config, form))
    others = tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name != "config.json"
        and not path.name.endswith(_WEIGHTS)
    )
    return Source(folder, config, tensors, frozenset(expected), others, sharded)


def written_config(config: dict[str, Any], form: Format) -> dict[str, Any]:
    """The config.json of the quantised model."""
    written = config | {"quantization_config": form.config()}
    if form.dtype is not None:
        name = "torch_dtype" if "torch_dtype" in config else "dtype"  # as transformers before 5 called it
        written[name] = form.dtype
    return written


def _config(folder: Path) -> dict[str, Any]:
    """The configuration, or nothing where ``check_model_folder`` will say what is wrong with it."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_class(names: list[str]) -> None:
    for name in names:
        if name not in ADMITTED:
            raise UnsupportedFeatureError(
                feature=f"quantising {name} (admitted are dense decoders: {', '.join(ADMITTED)})",
                where="dlinfer quantise",
                advice="use a checkpoint that is quantised already, or another tool: docs/guides/quantised_weights.md",
            )


def _tensors(folder: Path, sharded: bool) -> dict[str, Stored]:
    """Every tensor that LMDeploy would load, from the headers of files that are known to be whole."""
    from safetensors import safe_open

    if sharded:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    else:
        with safe_open(folder / SINGLE, framework="pt") as file:
            weight_map = dict.fromkeys(file.keys(), SINGLE)
    found: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        with safe_open(folder / shard, framework="pt") as file:
            for name in (name for name, where in weight_map.items() if where == shard):
                header = file.get_slice(name)
                found[name] = Stored(name, shard, header.get_dtype(), tuple(header.get_shape()))
    return found


def _check_weights(weights: dict[str, Stored], form: Format, refuse: Any) -> None:
    for one in weights.values():
        if one.dtype not in _FLOATING:
            advice = "give the checkpoint in floats that it was made of"
            raise refuse(f"it is quantised already: {one.name} has dtype {one.dtype}", advice)
        if len(one.shape) != 2 or not one.elements:
            raise refuse(f"{one.name} has the shape {list(one.shape)}", "give the checkpoint as it was saved")
        fault = form.fault(*one.shape)
        if fault:
            raise refuse(f"{one.name}: {fault}", f"use {_takes_it(form)}")


def _takes_it(form: Format) -> str:
    return "a smaller --group-size, or w8a8" if form.name == "awq-int4" else "awq-int4 or w8a8"
