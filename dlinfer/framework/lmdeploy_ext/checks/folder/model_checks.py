"""A model folder that cannot be served is refused before an engine starts, naming what is wrong and where.

Left to itself LMDeploy fails on such folders too, but late, from inside other libraries and in their words: "Repo
id must be in the form ...", "Unknown weight type", or a truncated file after the other shards have been loaded.
The checks read configuration, names and headers only, never a weight.
"""

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from dlinfer.errors import DlinferError, ModelFolderError
from dlinfer.framework.lmdeploy_ext.checks.folder import remote_code
from dlinfer.framework.lmdeploy_ext.checks.model.model_support import (
    architectures,
    check_support,
    quantisation_of,
)
from dlinfer.framework.lmdeploy_ext.checks.options import session_length
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.device import activation, vendor_devices
from dlinfer.framework.lmdeploy_ext.errors import NoCudaError
from dlinfer.framework.lmdeploy_ext.faults.models.model_classes import SAVED_AS
from dlinfer.framework.patching import Patch

logger = logging.getLogger("dlinfer")

_COPY_AGAIN = "copy or download the model again, whole"
# The files that a tokenizer's vocabulary comes in: tokenizers, sentencepiece, BPE, WordPiece, tekken and tiktoken.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_PACKED = ("qweight", "weight_packed")
_SAID_APART = ("quantize_config.json", "quant_config.json")


# --- the folder


def check_model_folder(folder: Path, trust_remote_code: bool = False) -> None:
    """Raise ModelFolderError unless ``folder`` holds a configuration of a known architecture, a vocabulary and whole
    weights, and UnsupportedFeatureError for a model that is not served.

    trust_remote_code: whether code in the folder will be run; this check runs none.
    """
    try:
        _check_model_folder(folder, trust_remote_code)
    except OSError as error:
        detail = f"{error.filename or 'a file of it'} cannot be read ({error.strerror or in_short(error)})"
        advice = "let this process read the folder and all of its files"
        raise _unusable(folder, detail, advice) from error


def _check_model_folder(folder: Path, trust_remote_code: bool) -> None:
    if not folder.is_dir():
        what = "it is a file, not a folder" if folder.exists() else "there is no such folder"
        raise _unusable(folder, what, "give the folder that holds config.json")
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


def _unusable(folder: Path | str, detail: str, advice: str) -> ModelFolderError:
    return ModelFolderError(path=str(folder), detail=detail, advice=advice)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        detail = f"it has no {name}"
        raise _unusable(folder, detail, "give the folder of a checkpoint in Hugging Face format") from None
    except ValueError as error:
        raise _unusable(folder, f"{name} is not valid JSON ({error})", _COPY_AGAIN) from None
    if not isinstance(content, dict):
        raise _unusable(folder, f"{name} does not hold a JSON object", _COPY_AGAIN)
    return content


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    """LMDeploy looks the class up by ``auto_map`` where there is one, else by ``architectures``.

    Configurations that name none at the top level (some nest them) are left to LMDeploy.
    """
    from lmdeploy.pytorch.models.module_map import MODULE_MAP
    from lmdeploy.pytorch.models.patch import CUSTOM_MODULE_MAP

    names = architectures(config)
    if (config.get("auto_map") or {}).get("AutoModelForCausalLM"):
        names = names[:1]
    known = (MODULE_MAP, CUSTOM_MODULE_MAP, SAVED_AS)
    if names and not any(name in classes for name in names for classes in known):
        detail = f"LMDeploy has no model class for its architecture {', '.join(names)}"
        raise _unusable(folder, detail, "see LMDeploy's list of supported models for the PyTorch engine")


def _check_dtypes(folder: Path, config: dict[str, Any]) -> None:
    """transformers takes the name for an attribute of torch."""
    for part in (config, *(one for one in config.values() if isinstance(one, dict))):
        for key in ("dtype", "torch_dtype"):
            named = part.get(key)
            if not isinstance(named, str) or named == "auto":
                continue
            found = getattr(torch, named, None) if named else None
            if not isinstance(found, torch.dtype) or not found.is_floating_point:
                detail = f"config.json has {key}={named!r}, which is no dtype of weights"
                raise _unusable(
                    folder, detail, "write bfloat16, float16 or float32 there, as the weights are"
                )


def _check_fields(folder: Path, config: dict[str, Any]) -> None:
    """LMDeploy goes on with a configuration of no model where transformers refuses the values of fields."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.get("auto_map") or config.get("model_type") not in CONFIG_MAPPING:
        return
    try:
        AutoConfig.from_pretrained(folder)
    except Exception as error:
        detail = f"transformers cannot read its config.json ({in_full(error)})"
        raise _unusable(folder, detail, "correct the field in config.json") from error


def _check_tokenizer(folder: Path) -> None:
    """transformers 5 makes up an empty tokenizer where there is no vocabulary, and the engine would serve it.

    A tokenizer of remote code may keep its vocabulary under any name.
    """
    if any(next(folder.glob(pattern), None) is not None for pattern in _VOCABULARIES):
        return
    config = _read_json(folder, _TOKENIZER_CONFIG) if (folder / _TOKENIZER_CONFIG).is_file() else {}
    if not config.get("auto_map"):
        detail = "its tokenizer is missing: there is none of " + ", ".join(_VOCABULARIES)
        raise _unusable(folder, detail, "save the tokenizer beside the model")


def _check_weights(folder: Path) -> set[str]:
    """The names of the tensors."""
    found = model_files.index_or_file(folder)
    if found is None:
        raise _unusable(
            folder, "it holds no weights (none of " + ", ".join(model_files.NAMES) + ")", _COPY_AGAIN
        )
    if not found.endswith(".index.json"):
        return _check_weight_file(folder, found, names=())
    weight_map = _read_json(folder, found).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _unusable(folder, f"{found} has no weight_map", _COPY_AGAIN)
    for shard in sorted(set(weight_map.values())):
        _check_weight_file(folder, shard, [name for name, file in weight_map.items() if file == shard])
    return set(weight_map)


def _check_weight_file(folder: Path, name: str, names: Iterable[str]) -> set[str]:
    """Return the names of a file's tensors. Raise ModelFolderError if one of ``names`` is missing."""
    if not (folder / name).is_file():
        raise _unusable(folder, f"its index names {name}, which is missing", _COPY_AGAIN)
    held = (_pickled_names if model_files.is_pickled(folder / name) else _safetensors_names)(folder, name)
    missing = sorted(set(names) - held)
    if missing:
        detail = f"{name} lacks {len(missing)} of the tensors that the index names, {missing[0]} first"
        raise _unusable(folder, detail, _COPY_AGAIN)
    return held


def _safetensors_names(folder: Path, name: str) -> set[str]:
    from safetensors import SafetensorError, safe_open

    try:
        # Opening reads the header and compares it with the length of the file. For torch it would map the file to be
        # written to, which Linux refuses where the file is larger than the memory.
        with safe_open(folder / name, framework="np") as file:
            return set(file.keys())
    except SafetensorError as error:
        raise _unusable(folder, f"{name} is truncated or corrupt ({error})", _COPY_AGAIN) from None


def _pickled_names(folder: Path, name: str) -> set[str]:
    try:
        return {tensor for tensor, _ in model_files.empty_tensors(folder / name)}
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - a pickle that is not whole fails in many ways
        raise _unusable(folder, f"{name} is truncated or corrupt ({in_short(error)})", _COPY_AGAIN) from None


def _check_unquantised(folder: Path, names: set[str]) -> None:
    """Packed weights that config.json says nothing of: AutoGPTQ and AutoAWQ used to write of them in another file."""
    packed = sorted(name for name in names if name.rpartition(".")[2] in _PACKED)
    if not packed:
        return
    apart = next((name for name in _SAID_APART if (folder / name).is_file()), None)
    advice = "add it, with its quant_method, as transformers saves it"
    if apart is not None:
        advice = f"put what {apart} holds there, with a quant_method of 'gptq' or 'awq'"
    detail = f"{packed[0]} is packed, and config.json has no quantization_config"
    raise _unusable(folder, detail, advice)


def in_short(error: BaseException) -> str:
    """Class and first line of an error whose text may be a page."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip(' :.')}" if lines else type(error).__name__


def in_full(error: BaseException) -> str:
    """Class and text of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def looks_like_path(name: str) -> bool:
    """Whether a model that does not exist here was meant as a path, since no hub id is spelled like it."""
    return name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1


# --- where LMDeploy meets it


def _get_task(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_task(
        backend: str, model_path: str, trust_remote_code: bool = False, backend_config: Any = None
    ) -> Any:
        if backend == "pytorch" and backend_config is not None:
            instead = vendor_devices.without_cuda(backend_config.device_type)
            if instead != backend_config.device_type:
                backend_config.device_type = instead
                backend_config.__post_init__()  # what is chosen by device
            if activation.serves(instead):
                check_model_folder(Path(model_path), trust_remote_code)
                session_length.check(model_path, backend_config.session_len, trust_remote_code)
        return original(backend, model_path, trust_remote_code, backend_config)

    return get_task


def _get_model(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def get_model(
        pretrained_model_name_or_path: str,
        download_dir: str | None = None,
        revision: str | None = None,
        token: str | None = None,
    ) -> str:
        name = pretrained_model_name_or_path
        if activation.active() is None:
            return original(name, download_dir, revision, token)
        advice = "correct the path; for a model id, see that the hub can be reached"
        if looks_like_path(name):
            raise _unusable(name, "there is no such folder", advice)
        try:
            return original(name, download_dir, revision, token)
        except Exception as error:  # every hub client has errors of its own
            detail = f"there is no such folder here, and no model of that name could be fetched ({in_short(error)})"
            raise _unusable(name, detail, advice) from error

    return get_model


def _load_tokenizer(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, model_dir: str, trust_remote_code: bool = False) -> None:
        if activation.active() is None:
            original(self, model_dir, trust_remote_code)
            return
        try:
            original(self, model_dir, trust_remote_code)
        except Exception as error:  # transformers answers a missing file with whatever it stumbles over
            detail = f"its tokenizer is missing or cannot be loaded ({in_short(error)})"
            advice = (
                "see that tokenizer.json or tokenizer.model is there; remote code needs trust_remote_code"
            )
            raise _unusable(model_dir, detail, advice) from error

    return __init__


# --- the command line


def _parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        parsed = original(self, args, namespace)
        device_type = getattr(parsed, "device", None)
        if device_type == "cuda" and hasattr(
            parsed, "backend"
        ):  # and not of LMDeploy's own ways of quantising
            if vendor_devices.lacks_cuda(device_type) and _names_device(
                sys.argv[1:] if args is None else args
            ):
                raise NoCudaError
            device_type = parsed.device = vendor_devices.without_cuda(device_type)
        if device_type is not None:
            vendor_devices.check_vendor(device_type)
            if activation.serves(device_type):
                activation.activate(device_type)
        return parsed

    return parse_args


def _names_device(arguments: Iterable[str]) -> bool:
    """Whether a command line names a device, by the option or what argparse takes for it."""
    names = (one.partition("=")[0] for one in arguments)
    return any(len(name) > len("--d") and "--device".startswith(name) for name in names)


def _run(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def run() -> None:
        try:
            original()
        except DlinferError as error:
            logger.debug("the way to the error:", exc_info=True)
            sys.exit(f"lmdeploy: error: {error}")

    return run


PATCHES = (
    Patch(
        target="lmdeploy.archs:get_task",
        why="the first to read the model folder, for pipeline, chat and server alike; finds out nothing but the arch",
        signature="(backend, model_path, trust_remote_code=False, backend_config=None)",
        build=_get_task,
    ),
    Patch(
        target="lmdeploy.utils:get_model",
        why="takes a mistyped path for a hub id and reports a network failure or an ill-formed id",
        signature="(pretrained_model_name_or_path, download_dir=None, revision=None, token=None)",
        build=_get_model,
        essential=False,
    ),
    Patch(
        target="lmdeploy.tokenizer:HuggingFaceTokenizer.__init__",
        why="a folder without tokenizer fails in transformers with advice on converting slow tokenizers",
        signature="(self, model_dir, trust_remote_code=False)",
        build=_load_tokenizer,
        essential=False,
    ),
    Patch(
        target="lmdeploy.cli.utils:FlexibleArgumentParser.parse_args",
        why="the command line looks for the model before it makes the engine config that chooses our device",
        signature="(self, args=None, namespace=None)",
        build=_parse_args,
        essential=False,
    ),
    Patch(
        target="lmdeploy.cli.entrypoint:run",
        why="a user of the command line needs the error, not the way to it",
        signature="()",
        build=_run,
        essential=False,
    ),
)
