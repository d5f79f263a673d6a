"""Refuses a broken or unsupported model folder before an engine starts. The error names the file and its fault.

Without these checks LMDeploy fails late, with an error of another library, such as "Repo id must be in the form ..." or
"Unknown weight type". It notices a truncated file only after it has loaded the files before that file. The checks read
configurations and the headers of weight files, but no weights.
"""

import os
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder import remote_code
from dlinfer.framework.lmdeploy_ext.checks.model import quantisation
from dlinfer.framework.lmdeploy_ext.checks.model.support import architectures, check_support, quantisation_of
from dlinfer.framework.lmdeploy_ext.checks.options import session_length
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.device import activation, vendor_devices
from dlinfer.framework.lmdeploy_ext.errors import in_short
from dlinfer.framework.lmdeploy_ext.faults.models.phimoe import SAVED_AS
from dlinfer.framework.lmdeploy_ext.gguf import folder as gguf
from dlinfer.framework.lmdeploy_ext.gguf.reader import is_gguf
from dlinfer.framework.patching import Original, replaces

_COPY_AGAIN = "copy or download the complete model again"
# The files that a tokenizer's vocabulary comes in: tokenizers, sentencepiece, BPE, WordPiece, tekken and tiktoken.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_PACKED = ("qweight", "weight_packed")
_SAID_APART = {
    "quantize_config.json": "add quant_method 'gptq' or 'awq'",
    "quant_config.json": f"add quant_method 'awq' and rename {quantisation.RENAMING}",
}
"""Files where AutoGPTQ and AutoAWQ put the configuration -> how to make it a ``quantization_config``."""


def check_model_folder(folder: Path, trust_remote_code: bool = False) -> None:
    """Raise ModelFolderError for a broken or incomplete folder, and UnsupportedFeatureError for an unsupported model.

    A complete folder has a configuration of a known architecture, a vocabulary and untruncated weight files.
    trust_remote_code: whether the engine may run Python code from the folder. This check itself runs none.
    """
    try:
        if not folder.is_dir():
            detail = "it is a file, not a folder" if folder.exists() else "there is no such folder"
            raise unusable(folder, detail, "give the folder that holds config.json")
        config = _read_json(folder, "config.json")
        check_support(config)
        _check_architecture(folder, config)
        _check_dtypes(folder, config)
        remote_code.check(folder, config, trust_remote_code)
        _check_fields(folder, config)
        _check_tokenizer(folder)
        names = _check_weights(folder)
        if not any(quantisation_of(config)):
            _check_unquantised(folder, names)
    except OSError as error:
        detail = f"{error.filename or 'a file in it'} cannot be read ({error.strerror or in_short(error)})"
        raise unusable(
            folder, detail, "give this process read access to the folder and all its files"
        ) from error


def unusable(folder: Path | str, detail: str, advice: str) -> ModelFolderError:
    """Return the error for an unusable model folder. detail: the fault. advice: the next step for the user."""
    return ModelFolderError(path=str(folder), detail=detail, advice=advice)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return model_files.read_json(folder / name)
    except FileNotFoundError:
        advice = "give the folder of a checkpoint in Hugging Face format"
        raise unusable(folder, f"it has no {name}", advice) from None
    except ValueError as error:
        raise unusable(folder, str(error), _COPY_AGAIN) from None


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a configuration if LMDeploy has no model class for its architecture.

    LMDeploy reads the architecture from ``auto_map`` if present, else from ``architectures``. If the top level of the
    configuration has neither, this check accepts it, because a nested configuration may name the architecture.
    """
    from lmdeploy.pytorch.models.module_map import MODULE_MAP
    from lmdeploy.pytorch.models.patch import CUSTOM_MODULE_MAP

    names = architectures(config)
    if (config.get("auto_map") or {}).get("AutoModelForCausalLM"):
        names = names[:1]
    known = MODULE_MAP.keys() | CUSTOM_MODULE_MAP.keys() | SAVED_AS.keys()
    if names and not known.intersection(names):
        detail = f"LMDeploy has no model class for its architecture {', '.join(names)}"
        raise unusable(
            folder, detail, "choose from LMDeploy's list of supported models for the PyTorch engine"
        )


def _check_dtypes(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a ``dtype`` that is not a floating-point dtype. transformers would accept any attribute name of torch."""
    parts = (config, *(value for value in config.values() if isinstance(value, dict)))
    for key, name in ((key, part.get(key)) for part in parts for key in ("dtype", "torch_dtype")):
        dtype = getattr(torch, name, None) if isinstance(name, str) and name else None
        is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if isinstance(name, str) and name != "auto" and not is_floating:
            detail = f"config.json has {key}={name!r}, which is not a floating-point dtype"
            raise unusable(folder, detail, "set it to the dtype of the weights: bfloat16, float16 or float32")


def _check_fields(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a configuration that transformers cannot read. LMDeploy would use a generic configuration instead."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.get("auto_map") or config.get("model_type") not in CONFIG_MAPPING:
        return
    try:
        AutoConfig.from_pretrained(folder)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"  # in one line
        detail = f"transformers cannot read its config.json ({why})"
        raise unusable(folder, detail, "correct config.json") from error


def _check_tokenizer(folder: Path) -> None:
    """Refuse a folder without a vocabulary file. transformers 5 would silently create an empty tokenizer.

    The check accepts any tokenizer with remote code, because its vocabulary file may have any name.
    """
    if any(next(folder.glob(pattern), None) is not None for pattern in _VOCABULARIES):
        return
    config = _read_json(folder, _TOKENIZER_CONFIG) if (folder / _TOKENIZER_CONFIG).is_file() else {}
    if not config.get("auto_map"):
        detail = "its tokenizer is missing: the folder has none of " + ", ".join(_VOCABULARIES)
        raise unusable(folder, detail, "save the tokenizer in the model folder")


def _check_weights(folder: Path) -> set[str]:
    """Return the names of all tensors in the weight files.

    Raises ModelFolderError if a file is missing or truncated, or lacks a tensor that the index places in it.
    """
    file = model_files.index_or_file(folder)
    if file is None:
        names = ", ".join(model_files.NAMES)
        raise unusable(folder, f"it holds no weights (none of {names})", _COPY_AGAIN)
    if not file.endswith(".index.json"):
        return _check_weight_file(folder, file, set())
    weight_map = _read_json(folder, file).get("weight_map")
    if not isinstance(weight_map, dict):
        raise unusable(folder, f"{file} has no weight_map", _COPY_AGAIN)
    for shard in sorted(set(weight_map.values())):
        _check_weight_file(folder, shard, {name for name, held in weight_map.items() if held == shard})
    return set(weight_map)


def _check_weight_file(folder: Path, file: str, names: set[str]) -> set[str]:
    """Return the names of the tensors in the weight file ``file``.

    names: the tensors that the index places in this file; empty without an index. Raises ModelFolderError if the file
    lacks one of them.
    """
    if not (folder / file).is_file():
        raise unusable(folder, f"its index names {file}, which is missing", _COPY_AGAIN)
    try:
        held = names_in(folder / file)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a file that is not whole fails in many ways
        raise unusable(folder, f"{file} is truncated or corrupt ({in_short(error)})", _COPY_AGAIN) from None
    if missing := sorted(names - held):
        detail = f"{file} lacks {missing[0]}, which the index places in it (missing tensors: {len(missing)})"
        raise unusable(folder, detail, _COPY_AGAIN)
    return held


def names_in(path: Path) -> set[str]:
    """Return the names of a weight file's tensors. Raises an error of the file's format for a broken file."""
    from safetensors import safe_open

    if model_files.is_pickled(path) or is_gguf(path):
        return {name for name, _ in model_files.empty_tensors(path)}
    # Opening reads the header and compares it with the file's length. With framework="torch" safetensors would map the
    # file as writable, and Linux refuses that for a file larger than the memory.
    with safe_open(path, framework="np") as file:
        return set(file.keys())


def _check_unquantised(folder: Path, names: set[str]) -> None:
    """Refuse packed weights without a quantization_config. Old AutoGPTQ and AutoAWQ put the config in another file."""
    packed = sorted(name for name in names if name.rpartition(".")[2] in _PACKED)
    if not packed:
        return
    advice = "add quantization_config with a quant_method to config.json, as transformers saves it"
    if apart := [name for name in _SAID_APART if (folder / name).is_file()]:
        advice = f"copy {apart[0]} into config.json as quantization_config, and {_SAID_APART[apart[0]]}"
    detail = f"{packed[0]} is packed, but config.json has no quantization_config"
    raise unusable(folder, detail, advice)


def looks_like_path(name: str) -> bool:
    """Return whether a model name must be a path, because it cannot be the id of a model on a hub."""
    return name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1


# --- where LMDeploy opens a folder


@replaces(
    "lmdeploy.archs:get_task",
    why="reads only the configuration, so a broken model folder fails later, with an error of another library",
)
def get_task(
    original: Original,
    backend: str,
    model_path: str,
    trust_remote_code: bool = False,
    backend_config: Any = None,
) -> Any:
    if backend == "pytorch" and backend_config is not None:
        instead = vendor_devices.without_cuda(backend_config.device_type)
        if instead != backend_config.device_type:
            backend_config.device_type = instead
            backend_config.__post_init__()  # other fields depend on the device
        if activation.serves(instead):
            check_model_folder(Path(model_path), trust_remote_code)
            session_length.check(model_path, backend_config.session_len, trust_remote_code)
    return original(backend, model_path, trust_remote_code, backend_config)


@replaces(
    "lmdeploy.pipeline:Pipeline.__init__",
    why="does not know GGUF files",
    essential=False,
)
def init_pipeline(
    original: Original,
    self: Any,
    model_path: str,
    backend_config: Any = None,
    chat_template_config: Any = None,
    log_level: str = "WARNING",
    max_log_len: int | None = None,
    trust_remote_code: bool = False,
    speculative_config: Any = None,
    allowed_media_domains: list[str] | None = None,
    **kwargs: Any,
) -> None:
    device = getattr(backend_config, "device_type", "cuda" if backend_config is None else None)
    is_ours = device is not None and activation.serves(vendor_devices.without_cuda(device))
    if is_ours and is_gguf(model_path):
        model_path = str(gguf.model_folder(model_path))
    original(
        self,
        model_path,
        backend_config,
        chat_template_config,
        log_level,
        max_log_len,
        trust_remote_code,
        speculative_config,
        allowed_media_domains,
        **kwargs,
    )


@replaces(
    "lmdeploy.utils:get_model",
    why="treats a mistyped path as a hub id, and reports a network failure or an ill-formed id",
    when=activation.is_on,
    essential=False,
)
def get_model(
    original: Original,
    pretrained_model_name_or_path: str,
    download_dir: str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    name = pretrained_model_name_or_path
    advice = "correct the path; for a model id, check that the hub can be reached"
    if looks_like_path(name):
        raise unusable(name, "there is no such folder", advice)
    try:
        return original(name, download_dir, revision, token)
    except Exception as error:  # every hub client has errors of its own
        why = in_short(error)
        detail = f"there is no such folder, and no model of this name could be downloaded ({why})"
        raise unusable(name, detail, advice) from error


@replaces(
    "lmdeploy.tokenizer:HuggingFaceTokenizer.__init__",
    why="passes on transformers' error for a folder without a tokenizer, which only advises how to convert slow "
    "tokenizers",
    when=activation.is_on,
    essential=False,
)
def load_tokenizer(original: Original, self: Any, model_dir: str, trust_remote_code: bool = False) -> None:
    try:
        original(self, model_dir, trust_remote_code)
    except Exception as error:  # transformers raises all kinds of errors for a missing file
        detail = f"its tokenizer is missing or cannot be loaded ({in_short(error)})"
        advice = "check that it has tokenizer.json or tokenizer.model; a tokenizer with code needs trust_remote_code"
        raise unusable(model_dir, detail, advice) from error
