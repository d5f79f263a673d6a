"""Ways in which a model folder is broken: each changes a good one in place."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Broken:
    """``apply`` breaks a good folder; the error then says ``words``."""

    apply: Callable[[Path], None]
    words: str


def _remove(pattern: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        found = list(folder.glob(pattern))
        assert found, f"the good model has no {pattern}"
        for file in found:
            file.unlink()

    return apply


def _truncate(fraction: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(content[: int(len(content) * fraction)])

    return apply


def _configure(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def _shard(weight_map: dict[str, str]) -> Callable[[Path], None]:
    """The index of a sharded checkpoint beside the one file that is there, under the first shard's name."""

    def apply(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return apply


def _write(name: str, text: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_text(text)

    return apply


def _index_alone(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text("{}")


def _pack(said_in: str | None) -> Callable[[Path], None]:
    """Weights as AutoGPTQ saved them, of which config.json says nothing. said_in: the file that does, if any."""

    def apply(folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        name = "model.layers.0.self_attn.q_proj.qweight"
        save_file({name: torch.zeros(8, 64, dtype=torch.int32)}, folder / WEIGHTS)
        if said_in is not None:
            (folder / said_in).write_text('{"bits": 4, "group_size": 128, "desc_act": false}')

    return apply


def _pickle(content: bytes) -> Callable[[Path], None]:
    """Weights as torch saves them, of these bytes."""

    def apply(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return apply


def _folder_in_place(name: str) -> Callable[[Path], None]:
    """Something that cannot be read, for root too."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return apply


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

BROKEN = {
    "no config": Broken(_remove("config.json"), "it has no config.json"),
    "empty folder": Broken(_empty, "it has no config.json"),
    "config is no JSON": Broken(_write("config.json", '{"model_type": '), "config.json is not valid JSON"),
    "config is a list": Broken(_write("config.json", "[]"), "config.json is not a JSON object"),
    "config cannot be read": Broken(
        _folder_in_place("config.json"), "config.json cannot be read (Is a directory)"
    ),
    **{
        f"dtype {named!r}": Broken(
            _configure(dtype=named), f"config.json has dtype={named!r}, which is not a floating-point dtype"
        )
        for named in ("float99", "fp16", "torch.float32", "", "int8", "Tensor")
    },
    "dtype by its old name": Broken(_configure(torch_dtype="half99"), "config.json has torch_dtype='half99'"),
    "a number as text": Broken(
        _configure(rms_norm_eps="1e-6"),
        "transformers cannot read its config.json (StrictDataclassFieldValidationError",
    ),
    "a text as number": Broken(_configure(hidden_size=64.5), "transformers cannot read its config.json ("),
    "a broken pickle": Broken(_pickle(b"no pickle"), "pytorch_model.bin is truncated or corrupt"),
    "a truncated pickle": Broken(
        _pickle(b"PK\x03\x04 and no more"), "pytorch_model.bin is truncated or corrupt"
    ),
    "an empty pickle": Broken(_pickle(b""), "pytorch_model.bin is truncated or corrupt"),
    "unknown architecture": Broken(
        _configure(architectures=["FrobnicatorForCausalLM"]),
        "LMDeploy has no model class for its architecture FrobnicatorForCausalLM",
    ),
    "unknown model type": Broken(
        _configure(architectures=["FrobnicatorForCausalLM"], model_type="frobnicator"),
        "LMDeploy has no model class for its architecture FrobnicatorForCausalLM",
    ),
    "remote code of an unknown architecture": Broken(
        _configure(auto_map={"AutoModelForCausalLM": "modeling_frob.FrobnicatorForCausalLM"}),
        "LMDeploy has no model class for its architecture FrobnicatorForCausalLM",
    ),
    "no tokenizer": Broken(_remove("token*"), "its tokenizer is missing"),
    "no vocabulary": Broken(_remove("tokenizer.json"), "its tokenizer is missing"),
    "truncated weights": Broken(_truncate(0.7), "model.safetensors is truncated or corrupt"),
    "truncated in the header": Broken(_truncate(0.001), "model.safetensors is truncated or corrupt"),
    "empty weights": Broken(_truncate(0), "model.safetensors is truncated or corrupt"),
    "no weights": Broken(_remove(WEIGHTS), "it holds no weights"),
    "missing shard": Broken(
        _shard({"model.norm.weight": FIRST, "lm_head.weight": SECOND}),
        f"its index names {SECOND}, which is missing",
    ),
    "shard lacks a tensor": Broken(
        _shard({"model.norm.weight": FIRST, "model.mislaid.weight": FIRST}),
        f"{FIRST} lacks model.mislaid.weight, which the index places in it (missing tensors: 1)",
    ),
    "packed weights": Broken(
        _pack(None),
        "q_proj.qweight is packed, but config.json has no quantization_config. Next step: add quant",
    ),
    "packed weights told of elsewhere": Broken(
        _pack("quantize_config.json"),
        "q_proj.qweight is packed, but config.json has no quantization_config. Next step: copy "
        "quantize_config.json into config.json",
    ),
    "packed weights with AutoAWQ's keys elsewhere": Broken(
        _pack("quant_config.json"),
        "copy quant_config.json into config.json as quantization_config, and add quant_method 'awq' and rename "
        "w_bit to bits and q_group_size to group_size",
    ),
    "index without a map": Broken(_index_alone, f"{INDEX} has no weight_map"),
}

CORRUPT_TOKENIZER = Broken(_write("tokenizer.json", "{"), "its tokenizer is missing or cannot be loaded")
"""Found when LMDeploy loads the tokenizer, which needs a process of its own."""
