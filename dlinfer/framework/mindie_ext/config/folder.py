"""Check that a folder holds a checkpoint that can be loaded. Weights are not read."""

import json
from pathlib import Path
from typing import Any


def fault_of_model(path: str, trust_remote_code: bool) -> tuple[str, str, Any] | None:
    """Return the fault (key, expected, given) of a model folder that cannot be loaded; None if it can be loaded."""
    folder = Path(path)
    if not folder.is_dir():
        return "model_id", "an existing folder", path
    config = folder / "config.json"
    if not config.is_file():
        return "model_id", "a folder with config.json", path
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        return "model_id", "valid JSON in config.json", f"{config}: {error}"
    if not isinstance(content, dict) or not content.get("model_type"):
        return "model_id", "a config.json that names a model_type", str(config)
    if not any(folder.glob("*.safetensors")):
        older = " (convert *.bin weights to safetensors)" if any(folder.glob("*.bin")) else ""
        return "model_id", f"a folder with *.safetensors{older}", path
    if content.get("auto_map") and not trust_remote_code and not _is_known(content["model_type"]):
        return (
            "trust_remote_code",
            f"true for {content['model_type']!r}, a model with code in its folder",
            False,
        )
    return None


def fault_of_tokenizer(path: str) -> tuple[str, str, Any] | None:
    """Return the fault (key, expected, given) of a tokenizer folder that cannot be loaded; None if it can be loaded."""
    folder = Path(path)
    if not folder.is_dir():
        return "tokenizer_path", "an existing folder", path
    if (
        not any(folder.glob("tokenizer*"))
        and not any(folder.glob("*.model"))
        and not any(folder.glob("vocab*"))
    ):
        return "tokenizer_path", "a folder with tokenizer files", path
    return None


def _is_known(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING
