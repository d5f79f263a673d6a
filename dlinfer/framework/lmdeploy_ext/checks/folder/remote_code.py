"""Refuses configurations that need code from the model's folder, which runs only with the user's consent.

Without consent, LMDeploy reads such a ``config.json`` into transformers' generic class, which serves where the file
holds all that LMDeploy's class reads. A nested configuration then stays a dict, and LMDeploy fails with an
AttributeError that names neither the file nor the option.
"""

from pathlib import Path
from typing import Any

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import language_configs


def code_of(config: dict[str, Any]) -> str | None:
    """Name of the file that defines the configuration's class; None where transformers has a class of its own.

    ``REPOSITORY--`` stands before it where the file lies elsewhere. config: as ``config.json`` has it.
    """
    from transformers import CONFIG_MAPPING

    named = (config.get("auto_map") or {}).get("AutoConfig")
    if not isinstance(named, str) or config.get("model_type") in CONFIG_MAPPING:
        return None
    return named.rpartition(".")[0] + ".py"


def check(folder: Path, config: dict[str, Any], trusted: bool) -> None:
    """Raise ModelFolderError for a configuration that cannot be read without its code, or whose code is missing."""
    code = code_of(config)
    if code is None:
        return
    if not trusted:
        nested = (config.get("vision_config"), config.get("audio_config"), *language_configs(config)[1:])
        if any(isinstance(part, dict) for part in nested):
            raise _untrusted(folder, code)
    elif "--" not in code and not (folder / code).is_file():
        raise ModelFolderError(
            path=str(folder),
            detail=f"config.json names {code}, the code of its configuration, which is missing",
            advice="copy or download the model again, whole",
        )


def unreadable(
    folder: Path, config: dict[str, Any], trusted: bool, error: AttributeError
) -> ModelFolderError | None:
    """The error to raise where LMDeploy misses an attribute of a configuration; None where it needs no code.

    LMDeploy does not say why code fails, and then reads the generic class as well.
    """
    code = code_of(config)
    if code is None:
        return None
    if not trusted:
        return _untrusted(folder, code)
    return ModelFolderError(
        path=str(folder),
        detail=f"its configuration's code, {code}, fails or does not set what LMDeploy reads ({error})",
        advice="load it by transformers' AutoConfig.from_pretrained(FOLDER, trust_remote_code=True) to see which",
    )


def _untrusted(folder: Path, code: str) -> ModelFolderError:
    return ModelFolderError(
        path=str(folder),
        detail=f"its configuration is code, {code}, which is not run without the option trust_remote_code",
        advice="read that file; if you trust it, give --trust-remote-code on the command line, or "
        "trust_remote_code=True to LMDeploy's pipeline",
    )
