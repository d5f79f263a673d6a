"""``check_model_config``: report all faults of a model_config at once, before anything is loaded."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from pydantic import ValidationError

from dlinfer.framework.mindie_ext.config.faults import Fault, Faults
from dlinfer.framework.mindie_ext.config.folder import fault_of_model, fault_of_tokenizer
from dlinfer.framework.mindie_ext.config.model_config import ModelConfig
from dlinfer.framework.mindie_ext.config.refused import REFUSED, refused
from dlinfer.framework.mindie_ext.config.visible_devices import VARIABLE, visible_devices
from dlinfer.framework.mindie_ext.errors import ModelConfigError

_ALIKE = 0.85
"""An unknown key is reported as a misspelling of a known key if difflib finds the two at least this similar."""


def check_model_config(model_config: Mapping[str, Any]) -> ModelConfig:
    """Check a model_config and return it in checked form. No weight is read, and nothing is allocated.

    Raises ModelConfigError with all faults: wrong values, keys that contradict each other, and folders without a model.
    """
    if not isinstance(model_config, Mapping):
        _raise([("model_config", "a mapping of keys to values", type(model_config).__name__)])
    config = {key: value for key, value in model_config.items() if isinstance(key, str)}
    faults: list[Fault] = [
        ("model_config", "keys that are text", key) for key in model_config if not isinstance(key, str)
    ]
    if config.get("backend_type") == "ms":
        advice = "'atb' ('ms' is MindIE's MindSpore backend, which is not supported)"
        faults.append(("backend_type", advice, "ms"))
        config["backend_type"] = "atb"
    faults += refused(config)
    faults += _misspelt(config)
    checked: ModelConfig | None = None
    try:
        checked = ModelConfig.model_validate(
            {key: value for key, value in config.items() if value is not None}
        )
    except ValidationError as error:
        faults += [_fault(detail) for detail in error.errors()]
    wrong = {key for key, _, _ in faults}
    faults += _against_each_other(config, wrong)
    faults += _folders(config, wrong)
    if faults or checked is None:
        _raise(faults)
    return checked


def _raise(faults: list[Fault]) -> NoReturn:
    raise ModelConfigError(faults=Faults(faults))


def _fault(error: Any) -> Fault:
    key = str(error["loc"][0])
    if error["type"] == "missing":
        return key, "a value: it is required", None
    description = ModelConfig.model_fields[key].description or ""
    return key, f"{error['msg'].removeprefix('Value error, ')} ({description})", error["input"]


def _misspelt(config: Mapping[str, Any]) -> Iterator[Fault]:
    known = (*ModelConfig.model_fields, *REFUSED)
    for key in config:
        if key in known:
            continue
        close = difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)
        if close and close[0] not in config:
            yield key, f"the key {close[0]!r}", config[key]


def _against_each_other(config: Mapping[str, Any], wrong: set[str]) -> Iterator[Fault]:
    def number(key: str) -> int | None:
        value = config.get(key, ModelConfig.model_fields[key].default)
        return None if key in wrong or value is None else int(value)

    size, rank, local, device = (number(key) for key in ("world_size", "rank", "local_rank", "npu_device_id"))
    if size is not None:
        if rank is not None and rank >= size:
            yield "rank", f"below world_size = {size}", rank
        if local is not None and local >= size:
            yield "local_rank", f"below world_size = {size}", local
        try:
            there = len(visible_devices(size))
        except ValueError as error:
            yield VARIABLE, str(error), config.get("npu_device_id")
        else:
            if device is not None and device >= there:
                yield "npu_device_id", f"below the {there} visible devices ({VARIABLE})", device
            if local is not None and local < size and local >= there:
                yield "local_rank", f"below the {there} visible devices ({VARIABLE})", local
    prompt, longest = number("max_input_len"), number("max_seq_len")
    if "max_input_len" in config and prompt is not None and longest is not None and prompt > longest:
        yield "max_input_len", f"at most max_seq_len = {longest}", prompt
    loras, lora_rank = number("max_loras"), number("max_lora_rank")
    if loras is not None and lora_rank is not None and bool(loras) != bool(lora_rank):
        yield ("max_lora_rank" if loras else "max_loras"), "both max_loras and max_lora_rank, or neither", 0


def _folders(config: Mapping[str, Any], wrong: set[str]) -> Iterator[Fault]:
    model = config.get("model_id")
    if isinstance(model, str) and "model_id" not in wrong:
        trusted = str(config.get("trust_remote_code", False)).lower() in ("true", "1")
        fault = fault_of_model(model, trusted)
        if fault is not None:
            yield fault
    tokenizer = config.get("tokenizer_path")
    if isinstance(tokenizer, str) and "tokenizer_path" not in wrong:
        fault = fault_of_tokenizer(tokenizer)
        if fault is not None:
            yield fault
