"""Refuses a model with a configuration class in remote code, if that code may not run or is missing.

Without ``trust_remote_code`` LMDeploy reads such a ``config.json`` into transformers' generic class. That works if the
file holds every field that LMDeploy reads. But the generic class leaves a nested configuration as a dict, and LMDeploy
fails with an AttributeError that names neither the file nor the option.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlinfer.errors import ModelFolderError
from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import language_configs


def code_of(config: dict[str, Any]) -> str | None:
    """Return the file that defines the configuration's class; None if transformers itself has the class.

    If the file is in another repository, the result begins with ``REPOSITORY--``.
    """
    from transformers import CONFIG_MAPPING

    named = (config.get("auto_map") or {}).get("AutoConfig")
    if not isinstance(named, str) or config.get("model_type") in CONFIG_MAPPING:
        return None
    return named.rpartition(".")[0] + ".py"


def check(folder: Path, config: dict[str, Any], trusted: bool) -> None:
    """Raise ModelFolderError if the configuration needs code that is missing or may not run."""
    code = code_of(config)
    if code is None:
        return
    nested = (config.get("vision_config"), config.get("audio_config"), *language_configs(config)[1:])
    if not trusted and any(isinstance(part, dict) for part in nested):
        raise _untrusted(folder, code)
    if trusted and "--" not in code and not (folder / code).is_file():
        detail = f"config.json takes its configuration class from {code}, which is missing"
        raise ModelFolderError(
            path=str(folder), detail=detail, advice="copy or download the complete model again"
        )


@contextmanager
def explained(folder: Path, trusted: bool) -> Iterator[None]:
    """Within the context, turn an AttributeError into a ModelFolderError, if the folder's configuration needs code.

    If this code fails, LMDeploy hides the reason, and uses transformers' generic class instead.
    """
    try:
        yield
    except AttributeError as error:
        code = code_of(model_files.readable_config(folder))
        if code is None:
            raise
        if not trusted:
            raise _untrusted(folder, code) from error
        detail = f"the code of its configuration, {code}, fails or does not set a field that LMDeploy reads ({error})"
        advice = (
            "call transformers' AutoConfig.from_pretrained(FOLDER, trust_remote_code=True) to see the error"
        )
        raise ModelFolderError(path=str(folder), detail=detail, advice=advice) from error


def _untrusted(folder: Path, code: str) -> ModelFolderError:
    detail = (
        f"its configuration class is remote code, {code}, which runs only with the option trust_remote_code"
    )
    advice = "read that file; if you trust it, add --trust-remote-code to the command line, or pass "
    advice += "trust_remote_code=True to LMDeploy's pipeline"
    return ModelFolderError(path=str(folder), detail=detail, advice=advice)
